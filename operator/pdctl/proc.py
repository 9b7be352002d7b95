"""What Linux says about processes and memory: resident size, CPU time, start time, children.

A pid alone names nothing for long. Where a process is to be signalled later, the supervisor holds a
pidfd; here pids are only read, and a process that has gone meanwhile reads as zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes(pid: int) -> int:
    """The resident set of a process; 0 when it is gone."""
    try:
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its children that ended; 0 when it is gone."""
    fields = _stat(pid)
    if fields is None:
        return 0.0
    return sum(int(fields[index]) for index in (11, 12, 13, 14)) / _TICKS_PER_SECOND


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, itself first; one pass over /proc."""
    children: dict[int, list[int]] = {}
    for other in _pids():
        fields = _stat(other)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(other)
    found = [pid]
    for parent in found:
        found.extend(children.get(parent, ()))
    return found


def _pids() -> Iterable[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, which may hold any character."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
