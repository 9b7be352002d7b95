# Everything on a fresh machine: `make up` needs git, make, python3 and python3-venv, nothing else.
# A set-up is a stamp that depends on what it was made from, so a second run costs nothing.

PYTHON ?= python3
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
PINS := pyproject.toml constraints.txt
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
FUZZ_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help up test soak interop fuzz lint bench bench-peers clean

help:
	@echo "make up     install, start 1 prefill + 1 decode + router, send a first prompt, stay up (Ctrl-C ends it)"
	@echo "make test   install, then all tests (PYTEST_ARGS='-k name' chooses)"
	@echo "make soak   kill every process in turn and let clients leave (SOAK_ARGS='--rounds 2')"
	@echo "make interop      install routers of others into a cache of their own, and let them drive our pair"
	@echo "make fuzz   hostile inputs for every port and codec (FUZZ_ARGS='--inputs 1000000')"
	@echo "make lint   format, lint, types, import contracts (own small environment, no torch)"
	@echo "make bench  figures, each against a limit or a peer of the same run (BENCH_ARGS='router control')"
	@echo "make bench-peers  install what benchmarks compare with into the same cache"
	@echo "make clean  remove environments and caches"

up: .venv/.local
	.venv/bin/pdctl up -f examples/local.yaml

test: .venv/.test
	tools/test-all $(PYTEST_ARGS)

soak: .venv/.test
	PYTHONPATH=tests OMP_NUM_THREADS=1 .venv/bin/python -P -m soak $(SOAK_ARGS)

interop: .venv/.test
	@tools/interop-peers "$(PYTHON)"
	.venv/bin/python -m pytest -m interop tests/interop $(PYTEST_ARGS)

fuzz: .venv/.test
	PYTHONPATH=tests .venv/bin/python -m fuzz.loop $(FUZZ_ARGS)

lint: .venv-lint/.lint
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/ruff check .
	.venv-lint/bin/mypy
	.venv-lint/bin/lint-imports

bench: .venv/.test
	.venv/bin/python bench/run.py $(BENCH_ARGS)

bench-peers: .venv/.test
	@tools/interop-peers "$(PYTHON)"
	@tools/bench-peers

clean:
	rm -rf .venv .venv-lint .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage
	find protocol sidecar engine operator tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@tools/check-python "$(PYTHON)"
	"$(PYTHON)" -m venv .venv

.venv-lint/bin/python:
	@tools/check-python "$(PYTHON)"
	"$(PYTHON)" -m venv .venv-lint

# The plain torch wheel brings its CUDA libraries along: some 2.5 GB to fetch, once.
.venv/.local: $(PINS) | .venv/bin/python
	@tools/system-libraries
	@echo "Installing what a local run needs (torch is large: this takes a few minutes the first time)"
	.venv/bin/python -m pip install $(PIP_FLAGS) --editable '.[local]'
	@touch $@

.venv/.test: $(PINS) | .venv/bin/python
	@tools/system-libraries
	@echo "Installing what the tests need (torch is large: this takes a few minutes the first time)"
	.venv/bin/python -m pip install $(PIP_FLAGS) --editable '.[test]'
	@touch $@ .venv/.local

.venv-lint/.lint: $(PINS) | .venv-lint/bin/python
	.venv-lint/bin/python -m pip install $(PIP_FLAGS) --editable '.[lint]'
	@touch $@
