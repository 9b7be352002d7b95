"""SGLang's own classes as processes, from the environment that `tools/bench-peers` makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HOME = Path(os.environ.get("PDCLUSTER_PEERS", Path.home() / ".cache/pdcluster-peers"))
PYTHON = HOME / "sglang-classes/bin/python"
FOLDER = Path(__file__).resolve().parent
HOW = "SGLang's classes are not installed: run `make bench-peers`"


def installed() -> bool:
    return PYTHON.exists()


def start(program: str, *arguments: str, **pipes: int) -> subprocess.Popen[bytes]:
    """Start a program of this folder in their environment; what it logs is not ours to show."""
    return subprocess.Popen(
        [str(PYTHON), str(FOLDER / program), *arguments],
        stdin=subprocess.PIPE,
        stdout=pipes.get("stdout", subprocess.DEVNULL),
        stderr=pipes.get("stderr", subprocess.DEVNULL),
        cwd=FOLDER,
        env={**os.environ, "SGLANG_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"},
    )


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
