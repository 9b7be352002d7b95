"""A warm nursery for tests: forks engines in milliseconds and tells how they ended."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from pdcluster_protocol.config import EngineConfig
from support.guards import ROOT

DEADLINE_SECONDS = 60.0


def environment() -> dict[str, str]:
    """Ours, with the source roots on the path."""
    roots = os.pathsep.join(str(ROOT / name) for name in ("protocol", "engine"))
    return {**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1"}


class Nursery:
    """`with Nursery(folder) as nursery: pid = nursery.fork(config)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: dict[int, int] = {}
        self._answers: list[dict[str, Any]] = []
        self._pending = b""
        keys = folder / "keys"
        keys.mkdir()
        (keys / "k1").write_bytes(secrets.token_bytes(32))

    def __enter__(self) -> Nursery:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdcluster_engine.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), "PDCLUSTER_PARENT_PID": str(os.getpid())},
        )
        assert self.process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)
        self.threads = int(self.answer()["ready"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        assert 0 == self.process.wait(DEADLINE_SECONDS)
        self._selector.close()
        self.process.stdout.close()

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def fork(self, config: EngineConfig) -> int:
        """Start an engine; its output goes to `log_of`."""
        path = self.folder / f"{config.instance}.json"
        path.write_bytes(msgspec.json.encode(config))
        log = str(self.log_of(config))
        self.send(json.dumps({"op": "fork", "config": str(path), "log": log, "env": {}}).encode())
        return int(self.answer()["pid"])

    def log_of(self, config: EngineConfig) -> Path:
        return self.folder / f"{config.instance}.log"

    def answer(self) -> dict[str, Any]:
        """The next line that is no exit."""
        while not self._answers:
            self._read()
        return self._answers.pop(0)

    def exit_of(self, pid: int) -> int:
        """The status of a child, once it has ended."""
        while pid not in self.exits:
            self._read()
        return self.exits[pid]

    def _read(self) -> None:
        assert self.process.stdout is not None
        assert self._selector.select(DEADLINE_SECONDS), "the nursery says nothing"
        chunk = os.read(self.process.stdout.fileno(), 65536)
        assert chunk, "the nursery has ended"
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "exit" in said:
                self.exits[said["exit"]] = said["status"]
            else:
                self._answers.append(said)


def wait_gone(pid: int, *, seconds: float = 10.0) -> None:
    """Until a process that is no child of ours has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        gone = selector.select(seconds)
    os.close(descriptor)
    assert gone, f"process {pid} is still there after {seconds} s"


def children(pid: int) -> list[int]:
    """The direct children of a process, of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """What of a process is in memory, shared pages included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def deadline_in(seconds: float) -> float:
    return time.monotonic() + seconds
