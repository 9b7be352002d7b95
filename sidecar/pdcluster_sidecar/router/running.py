"""The sequences that are under way, and the wait for none."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

SequenceT = TypeVar("SequenceT")


class Running(Generic[SequenceT]):
    """A set that can be waited for until it is empty."""

    def __init__(self) -> None:
        self._sequences: set[SequenceT] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, sequence: SequenceT) -> None:
        self._sequences.add(sequence)
        self._idle.clear()

    def discard(self, sequence: SequenceT) -> None:
        self._sequences.discard(sequence)
        if not self._sequences:
            self._idle.set()

    def sequences(self) -> tuple[SequenceT, ...]:
        """All of them now; the set may change while they are visited."""
        return tuple(self._sequences)

    async def wait_idle(self, *, seconds: float) -> None:
        """Wait until none is left, or so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return
