"""Named deadlines: set, cleared and collected; the earliest one is the node's next wake-up."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

NameT = TypeVar("NameT")


class Deadlines(Generic[NameT]):
    """A heap with lazy deletion: the dictionary is the truth, the heap only an order.

    A deadline that is put off, as a clock of progress is by every event, keeps its place in the
    heap until that comes up.
    """

    __slots__ = ("_count", "_heap", "_queued", "_when")

    def __init__(self) -> None:
        self._when: dict[NameT, float] = {}
        self._queued: dict[NameT, float] = {}
        """The earliest place in the heap of each name that is set."""
        self._heap: list[tuple[float, int, NameT]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._when)

    def has(self, name: NameT) -> bool:
        """Whether the deadline is set."""
        return name in self._when

    def names(self) -> tuple[NameT, ...]:
        """Every deadline that is set."""
        return tuple(self._when)

    def set(self, name: NameT, when: float) -> None:
        """Set or move a deadline."""
        self._when[name] = when
        queued = self._queued.get(name)
        if queued is None or when < queued:
            self._push(name, when)
        if len(self._heap) > 64 + 4 * len(self._when):
            self._heap = [(at, i, key) for i, (key, at) in enumerate(self._when.items())]
            heapq.heapify(self._heap)
            self._count = len(self._heap)
            self._queued = dict(self._when)

    def clear(self, name: NameT) -> None:
        """Forget a deadline; unknown names are fine."""
        if self._when.pop(name, None) is not None:
            del self._queued[name]

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            at, _, name = self._heap[0]
            when = self._when.get(name)
            if when == at:
                return when
            heapq.heappop(self._heap)
            if when is not None and self._queued[name] == at:
                # It was put off since.
                self._push(name, when)
        return None

    def due(self, now: float) -> list[NameT]:
        """Take out all deadlines at or before `now`, earliest first."""
        names = []
        while (when := self.next()) is not None and when <= now:
            name = heapq.heappop(self._heap)[2]
            del self._when[name]
            del self._queued[name]
            names.append(name)
        return names

    def _push(self, name: NameT, when: float) -> None:
        self._count += 1
        self._queued[name] = when
        heapq.heappush(self._heap, (when, self._count, name))
