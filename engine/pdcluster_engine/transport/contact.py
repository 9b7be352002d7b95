"""What bounds a call into the library that hands over an operation.

The first contact with a hung peer blocks inside the library for a minute, with every other peer
behind it. A process of its own can afford an alarm without a handler: it ends the process, even
inside the library. A thread cannot be ended, so in the engine's process nothing bounds the call;
the owner thread sees that no answer comes, ends the generation, and ends the process only when that
does not come to an end either.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

TARGETS_MAX = 1024

ContactGuard = Callable[[str], AbstractContextManager[object]]
"""Entered for each operation with the peer's session name."""


class Alarm:
    """A `ContactGuard` that ends this process when a call does not come back in time."""

    __slots__ = ("_met", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._met: set[str] = set()
        """Peers that were written to before."""

    def __call__(self, target: str) -> Alarm:
        self._note_first_contact(target)
        return self

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _note_first_contact(self, target: str) -> None:
        """Leave the peer's name on stderr: should the alarm end us, it says who hung."""
        if target in self._met:
            return
        if len(self._met) >= TARGETS_MAX:
            self._met.clear()
        self._met.add(target)
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"first contact with {target}\n".encode())


def unguarded(_target: str) -> AbstractContextManager[None]:
    """A `ContactGuard` for a thread, where somebody else looks at the clock."""
    return contextlib.nullcontext()
