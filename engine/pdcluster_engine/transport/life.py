"""One life of a transport (a generation), seen from the engine's owner thread.

It is a process (`child.Child`), or a thread where the memory cannot be shared with another process
(`inprocess.AdapterThread`). Both talk over the same channel; what differs is how they end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdcluster_engine.transport.causes import StderrTail
from pdcluster_engine.transport.channel import Channel
from pdcluster_engine.transport.process import FromProcess


class Life(Protocol):
    """What `SupervisedTransport` holds of a generation."""

    channel: Channel[FromProcess]
    stderr: StderrTail

    @property
    def end_seconds(self) -> float | None:
        """How long its end may take before nothing but the end of this process helps.

        None: the kernel sees to it.
        """

    @property
    def pid(self) -> int:
        """The process that it runs in."""

    @property
    def stderr_fd(self) -> int:
        """Readable when `stderr` has something to drain."""

    @property
    def end_fd(self) -> int:
        """Readable from its end on."""

    def kill(self) -> None:
        """Have it end; `reaped` says when the memory is safe."""

    def reaped(self) -> bool:
        """Whether it has ended, and nothing of it touches the arena any more."""

    def explain(self) -> str:
        """How it ended."""

    def close(self) -> None:
        """End it if it lives, wait for that a few seconds, and release every descriptor."""

    def release(self) -> None:
        """Release the descriptors of one that ended, or that nobody waits for any longer."""


BeginLife = Callable[[int], Life]
"""Begin a generation whose arena shall lie at this address, where it can be moved.

Raises:
    OSError: no process, thread, descriptor or memory is left.
"""
