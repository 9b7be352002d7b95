"""Every command of the README is executed, in its order, as a reader would.

Left out are the apt line and the clone, whose form `tests/unit/test_readme.py` checks, and
`make test`, which is running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.guards import COMPONENTS, ROOT
from support.readme import commands

FORM_ONLY = ("sudo apt-get", "git clone", "cd ", "make test")
FOREGROUND = "make up"
DETACHED = "--detach"
OFFLINE = ("plan", "size")
READY = "http://127.0.0.1:8000/ready"
STARTUP_SECONDS = 240.0
STOP_SECONDS = 10.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


PYTHONPATH = os.pathsep.join(str(ROOT / name) for name in COMPONENTS)


def run(command: str) -> str:
    """What a reader's shell would do; fails with the whole output.

    Returns when the pipes close, so a detached process must let go of its output.
    """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "BENCH_ARGS": "--quick"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def router_answers() -> bool:
    try:
        with urllib.request.urlopen(READY, timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return False
    except OSError:
        return False


def wait_ready(process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    pause = threading.Event()
    while not router_answers():
        shown = output.read_text(encoding="utf-8", errors="replace")
        assert process.poll() is None, shown
        assert time.monotonic() < deadline, shown
        pause.wait(0.2)


@contextmanager
def foreground(output: Path) -> Iterator[None]:
    """`make up` until its router is ready; at the end Ctrl-C, as a terminal sends it."""
    assert not router_answers(), "port 8000 is taken: end the other run (.venv/bin/pdctl down)"
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["make", "up"], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_ready(process, output)
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(STOP_SECONDS)
    assert not router_answers(), "the router still answers after Ctrl-C"


def test_plans_and_sizes_need_nothing_running() -> None:
    steps = [line.split() for line in commands(ROOT / "README.md")]
    offline = [words for words in steps if words[1:2] and words[1] in OFFLINE]

    assert {*OFFLINE} == {words[1] for words in offline}
    for words in offline:
        assert run(" ".join([f"{sys.executable} -m pdctl", *words[1:]]))


def test_every_command_of_the_readme_works(tmp_path: Path) -> None:
    steps = [line for line in commands(ROOT / "README.md") if not line.startswith(FORM_ONLY)]
    start = steps.index(FOREGROUND)
    stop = next(index for index, line in enumerate(steps) if DETACHED in line)

    with foreground(tmp_path / "up.txt"):
        answers = {line: run(line) for line in steps[start + 1 : stop]}
    answers |= {line: run(line) for line in steps[:start] + steps[stop:]}

    (completion,) = [text for line, text in answers.items() if line.startswith("curl")]
    (choice,) = json.loads(completion)["choices"]
    assert {"stop", "length"} >= {choice["finish_reason"]}
    assert set(steps) == {FOREGROUND, *answers}
