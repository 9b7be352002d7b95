"""Wake-up calls for sequences: one timer of the event loop for all of them.

A sequence sets its alarm once or twice and hardly ever hears it ring, and a timer of the loop costs
several times what an entry in a heap does.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from pdcluster_protocol.deadlines import Deadlines


class Sleeper(Protocol):
    """Who wants to be woken."""

    def wake(self) -> None: ...


SleeperT = TypeVar("SleeperT", bound=Sleeper)


class Alarms(Generic[SleeperT]):
    """Each sleeper's one alarm."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadlines: Deadlines[SleeperT] = Deadlines()
        self._timer: asyncio.TimerHandle | None = None

    def set(self, sleeper: SleeperT, when: float) -> None:
        """Wake the sleeper then; it is told once."""
        self._deadlines.set(sleeper, when)
        self._arm(when)

    def clear(self, sleeper: SleeperT) -> None:
        """Let it sleep."""
        self._deadlines.clear(sleeper)

    def close(self) -> None:
        """Wake nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        for sleeper in self._deadlines.due(self._loop.time()):
            sleeper.wake()
        if (when := self._deadlines.next()) is not None:
            self._arm(when)
