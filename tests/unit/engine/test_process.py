"""Sizes, keys, parents and exit codes of an engine process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_engine.environment import PARENT_PID_VARIABLE, follow_parent, memory_bytes
from pdcluster_engine.keys import load_keys
from pdcluster_engine.sizes import check_context, page_count
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import Role
from pdcluster_protocol.layout import KVLayout, Region
from support.nursery import environment

LAYOUT = KVLayout(64, "float32", (Region(0, "key", 512), Region(0, "value", 512)))
PAGE_BYTES = 64 * 1024


def config(*, max_context: int = 1000, pages: int = 0) -> EngineConfig:
    return EngineConfig(
        cluster="c",
        instance="i",
        role=Role.DECODE,
        host="127.0.0.1",
        link_path="link",
        keys_folder="keys",
        model_source="builtin://tiny-llama",
        served_name="m",
        max_context=max_context,
        pages=pages,
    )


@pytest.mark.parametrize(
    ("pages", "memory", "expected"),
    [(0, 1 << 40, 64), (0, 8 * PAGE_BYTES * 20, 20), (0, 8 * PAGE_BYTES * 16, 16), (17, 1, 17)],
    ids=["four contexts", "an eighth", "just one context", "as told"],
)
def test_the_pool_is_four_contexts_or_an_eighth_of_the_memory(
    pages: int, memory: int, expected: int
) -> None:
    assert expected == page_count(config(pages=pages), [LAYOUT], memory_bytes=memory)


@pytest.mark.parametrize(
    ("pages", "memory", "says"),
    [(0, 8 * PAGE_BYTES * 15, "lower max_context or set pages"), (15, 1 << 40, "raise pages")],
)
def test_a_pool_below_one_context_is_refused(pages: int, memory: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        page_count(config(pages=pages), [LAYOUT], memory_bytes=memory)


@pytest.mark.parametrize("wanted", [0, 513])
def test_a_context_that_the_model_lacks_is_refused(wanted: int) -> None:
    with pytest.raises(ConfigError, match=f"max_context is {wanted}"):
        check_context(config(max_context=wanted), model_max=512)


def test_this_machine_has_memory() -> None:
    assert memory_bytes() > 1 << 28


def test_keys_are_files_and_kubernetes_own_links_are_none(tmp_path: Path) -> None:
    (tmp_path / "k2").write_bytes(b"b" * 32)
    (tmp_path / "..data").mkdir()
    (tmp_path / ".hidden").write_bytes(b"short")
    assert b"b" * 32 == load_keys(str(tmp_path)).key("k2")


def test_a_missing_keys_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="keys_folder is 'nowhere'"):
        load_keys("nowhere")


@pytest.mark.parametrize("value", ["one", "1"])
def test_a_parent_that_is_not_ours_is_refused(value: str) -> None:
    program = (
        "from pdcluster_engine.environment import follow_parent\n"
        "from pdcluster_protocol.errors import ConfigError\n"
        "try:\n    follow_parent()\nexcept ConfigError as error:\n    print(error)"
    )
    done = _python(program, {PARENT_PID_VARIABLE: value})
    assert PARENT_PID_VARIABLE in done.stdout


def test_without_a_supervisor_nothing_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_PID_VARIABLE, raising=False)
    follow_parent()


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        ("ZeroDivisionError('x')", 1),
        ("ConfigError('x')", 2),
        ("LinkRefused('x')", 3),
        ("TransportError('x')", 4),
    ],
)
def test_a_thread_that_fails_ends_the_process_with_its_own_code(raised: str, status: int) -> None:
    program = (
        "import threading\n"
        "from pdcluster_engine.link import LinkRefused\n"
        "from pdcluster_engine.process import _start\n"
        "from pdcluster_protocol.errors import ConfigError, TransportError\n"
        f"def body():\n    raise {raised}\n"
        "_start('model', body)\n"
        "threading.Event().wait(20)\n"
    )
    done = _python(program, {})
    assert status == done.returncode
    assert "thread_" in done.stderr + done.stdout


def _python(program: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
