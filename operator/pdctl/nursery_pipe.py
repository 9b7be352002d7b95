"""The supervisor's side of the nursery: JSON lines over its standard input and output.

The nursery answers fork requests in order, so the children that wait for a pid form a queue.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque

import msgspec

from pdctl.child import Child

LINE_BYTES_MAX = 1 << 16
WAITING_MAX = 1024


class NurseryAnswer(msgspec.Struct, frozen=True):
    """One line of the nursery; exactly one of the fields says what it is."""

    pid: int | None = None
    error: str | None = None
    exit: int | None = None
    status: int | None = None
    ready: int | None = None


class NurseryPipe:
    """Requests to one nursery process, and the children that wait for its answers."""

    __slots__ = ("_pending", "process", "read_fd", "waiting", "write_fd")

    def __init__(self, process: Child, write_fd: int, read_fd: int) -> None:
        self.process = process
        self.write_fd = write_fd
        self.read_fd = read_fd
        self.waiting: deque[Child] = deque()
        self._pending = b""

    def fork(self, child: Child, *, log: str, env: dict[str, str]) -> bool:
        """Ask for a child; False when the nursery cannot be asked (it has ended, or is stuck)."""
        request = {"op": "fork", "config": child.spec.config, "log": log, "env": env}
        line = msgspec.json.encode(request) + b"\n"
        if len(self.waiting) >= WAITING_MAX:
            return False
        try:
            written = os.write(self.write_fd, line)
        except OSError:
            return False
        if written != len(line):
            return False
        self.waiting.append(child)
        return True

    def read(self) -> list[NurseryAnswer] | None:
        """The answers that have come; None when the nursery closed its output.

        A line that is none of its answers is passed over: it may be a library's print.
        """
        try:
            chunk = os.read(self.read_fd, 65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        self._pending = self._pending[-LINE_BYTES_MAX:]
        answers = []
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                answers.append(msgspec.json.decode(line, type=NurseryAnswer))
        return answers

    def close(self) -> None:
        """Close both ends; the nursery sees its input end and ends itself."""
        for descriptor in (self.write_fd, self.read_fd):
            with contextlib.suppress(OSError):
                os.close(descriptor)
