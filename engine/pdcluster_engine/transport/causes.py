"""The transfer process's stderr: its last lines, and what they mean in our words.

Mooncake answers every failure with -1; the reason stands only in its log.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque

LINES_MAX = 40
LINE_CHARS_MAX = 400
READS_A_TURN = 16

CAUSES = (
    ("no transfer progress within", "the peer accepted no byte for 3 s"),
    ("not within any registered buffer", "the peer has not registered that memory"),
    ("rejected by server", "the peer refused the range: not within its registered memory"),
    ("queue-full", "the queue for that peer is full"),
    ("failed to get IP address", "the peer's host is not an IPv4 address"),
    ("Connection refused", "connection refused: no transfer process listens there"),
    ("No route to host", "no route to the peer's host"),
    ("Network is unreachable", "the peer's network is unreachable"),
    ("Connection reset by peer", "connection reset: the peer's transfer process ended"),
    ("End of file", "connection closed: the peer's transfer process ended"),
    ("Broken pipe", "connection closed: the peer's transfer process ended"),
    ("Bad address", "the memory of one side is not mapped"),
    ("No valid port found", "no free port in the range"),
)
"""Part of a log line, and the cause that it names; the first match in the newest line counts."""

_EXPECTED = ("Local segment descriptor not found", "Logging before InitGoogleLogging")
_GLOG_PREFIX = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ [^ \]]+\] ")


class StderrTail:
    """Reads one pipe without blocking and keeps its last lines."""

    __slots__ = ("_fd", "_lines", "_partial")

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._partial = b""

    def drain(self) -> bool:
        """Take what is there; `False` when the pipe has ended."""
        for _ in range(READS_A_TURN):
            try:
                chunk = os.read(self._fd, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            *lines, rest = (self._partial + chunk).split(b"\n")
            self._partial = rest[-LINE_CHARS_MAX:]
            for line in lines:
                self._keep(line)
        return True

    def cause(self) -> str:
        """The newest cause that the lines name, or an empty string."""
        for line in reversed(self._lines):
            for part, meaning in CAUSES:
                if part in line:
                    return meaning
        return ""

    def last_line(self) -> str:
        """The newest line without the logger's prefix, or an empty string."""
        return self._lines[-1] if self._lines else ""

    def _keep(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace")[:LINE_CHARS_MAX]
        if line.strip() and not any(part in line for part in _EXPECTED):
            self._lines.append(_GLOG_PREFIX.sub("", line))


def explain_exit(returncode: int) -> str:
    """How a process ended, in words, from `Popen.returncode`."""
    if returncode == -signal.SIGALRM:
        return "the library did not come back from one call in time (a peer that hangs)"
    if returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exited with {returncode}"
