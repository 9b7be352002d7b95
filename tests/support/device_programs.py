"""The test's end of `device_program`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[2]


def compare_on(
    device: str, *, model: str, mode: str, lengths: Sequence[int], timeout_seconds: float = 100.0
) -> list[dict[str, Any]]:
    """One comparison for each length, and a last one after a fence of decode."""
    roots = ("protocol", "engine", "tests")
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "support.device_program",
            device,
            model,
            mode,
            ",".join(str(length) for length in lengths),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_seconds,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in roots),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert 0 == done.returncode, done.stderr.decode(errors="replace")[-4000:]
    return [msgspec.json.decode(line) for line in done.stdout.splitlines()]


def require_equal(comparisons: Sequence[dict[str, Any]], *, count: int) -> None:
    """A pair gives the tokens and logprobs of one engine, and moves each row once."""
    assert count == len(comparisons)
    assert comparisons[-1]["fenced"]
    for one in comparisons:
        assert [["None", ""]] * 3 == one["ends"], one
        assert one["alone"] == one["pair"], one
        assert one["expected_bytes"] == one["bytes"], one
