"""The test's end of `transport_program`."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from support.ports import transfer_ports

WAIT_SECONDS = 30.0
ROOT = Path(__file__).parents[2]


class RemoteSide:
    """One process with an in-process transport."""

    def __init__(self, popen: subprocess.Popen[bytes], nbytes: int) -> None:
        self.popen = popen
        self.nbytes = nbytes
        self._unread: list[dict[str, Any]] = []
        self._partial = b""

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tell(self, do: str, **fields: Any) -> None:
        """One command."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(msgspec.json.encode({"do": do, **fields}) + b"\n")
        self.popen.stdin.flush()

    def wait(self, event: str) -> dict[str, Any]:
        """The next line about such an event; others stay unread."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            for position, line in enumerate(self._unread):
                if line["event"] == event:
                    return self._unread.pop(position)
            self._read(deadline, event)

    def wait_completed(self, count: int) -> list[dict[str, Any]]:
        return [self.wait("Completed") for _ in range(count)]

    def ask_digest(self) -> int:
        """xxh3_64 of the whole arena, computed by the process's main thread."""
        self.tell("look")
        return int(self.wait("Seen")["digest"])

    def _read(self, deadline: float, wanted: str) -> None:
        assert self.popen.stdout is not None
        left = deadline - time.monotonic()
        ready = select.select([self.popen.stdout], [], [], max(0.0, left))[0]
        assert ready, f"no {wanted} within {WAIT_SECONDS} s; unread are {self._unread[-5:]}"
        chunk = os.read(self.popen.stdout.fileno(), 1 << 16)
        assert chunk, f"the process ended before {wanted}; unread are {self._unread[-5:]}"
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._unread += [msgspec.json.decode(line) for line in lines]


@contextmanager
def remote_side(host: str, *, device: str = "host", nbytes: int = 16 << 20) -> Iterator[RemoteSide]:
    """Start a process and end it, whatever it is doing."""
    roots = ("protocol", "engine", "tests")
    popen = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "support.transport_program",
            host,
            str(transfer_ports()["transport_port_min"]),
            str(nbytes),
            device,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in roots)},
    )
    try:
        yield RemoteSide(popen, nbytes)
    finally:
        popen.kill()
        popen.communicate(timeout=WAIT_SECONDS)
