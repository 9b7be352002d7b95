"""The bounded queue: who may run now, who waits, who is refused.

A sequence runs when one of `max_in_flight` places is free and a pair can be had. All others wait in
order of arrival, at most `max_queued` of them; a retry goes to the front, since it has waited. How
long one may wait is the sequence's own clock.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from pdcluster_sidecar.router.pick import Group, Placement, choose_pair


class Waiter(Protocol):
    """A sequence that wants a pair."""

    @property
    def pages_needed(self) -> int: ...

    @property
    def digest(self) -> str | None: ...

    def placed(self, placement: Placement) -> None: ...


class Admission:
    """One queue for the whole router."""

    def __init__(
        self,
        groups: Callable[[], Sequence[Group]],
        dice: random.Random,
        *,
        max_in_flight: int,
        max_queued: int,
        in_turn: bool,
    ) -> None:
        self._groups = groups
        self._dice = dice
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._in_turn = in_turn
        self._waiting: OrderedDict[int, Waiter] = OrderedDict()
        self._in_flight = 0
        self._waking = False

    @property
    def queued_count(self) -> int:
        return len(self._waiting)

    @property
    def in_flight_count(self) -> int:
        return self._in_flight

    def has_pair(self, digest: str | None) -> bool:
        """Whether any pair could serve a sequence with this tokenizer."""
        return choose_pair(self._groups(), self._dice, digest=digest) is not None

    def takes(self, count: int) -> bool:
        """Whether `count` more sequences can run or wait."""
        free = self._max_in_flight - self._in_flight - len(self._waiting)
        return count <= max(0, free) or len(self._waiting) + count <= self._max_queued

    def enter(self, waiter: Waiter, *, first: bool = False) -> None:
        """Line up; `placed` is called now or later, unless `leave` comes before."""
        self._waiting[id(waiter)] = waiter
        if first:
            self._waiting.move_to_end(id(waiter), last=False)
        self.wake()

    def leave(self, waiter: Waiter) -> None:
        """Give up waiting; one that does not wait may leave too."""
        self._waiting.pop(id(waiter), None)

    def release(self, placement: Placement, *, prefill_released: bool) -> None:
        """A try has ended: its place is free."""
        if not prefill_released:
            placement.prefill.slot.in_flight -= 1
        placement.decode.slot.in_flight -= 1
        self._in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Place whoever can be placed, in order; the first who cannot stops the rest."""
        if self._waking:
            # A waiter that is placed may end at once and wake us again.
            return
        self._waking = True
        try:
            while self._waiting and self._in_flight < self._max_in_flight:
                waiter = next(iter(self._waiting.values()))
                placement = choose_pair(
                    self._groups(),
                    self._dice,
                    pages=waiter.pages_needed,
                    digest=waiter.digest,
                    in_turn=self._in_turn,
                )
                if placement is None:
                    return
                self._waiting.popitem(last=False)
                self._occupy(placement)
                waiter.placed(placement)
        finally:
            self._waking = False

    def _occupy(self, placement: Placement) -> None:
        self._in_flight += 1
        for place in (placement.prefill, placement.decode):
            place.slot.in_flight += 1
            place.slot.used_count += 1
