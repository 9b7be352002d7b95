"""What happened to each key: a bounded log of transitions, for errors, dumps and log lines."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from pdcluster_protocol.ids import Key


class Transition(msgspec.Struct, frozen=True):
    """One step of one machine."""

    at: float
    machine: str
    before: str
    trigger: str
    after: str
    detail: str = ""

    def __str__(self) -> str:
        tail = f" ({self.detail})" if self.detail else ""
        return f"{self.machine}: {self.before} --{self.trigger}--> {self.after}{tail}"


class Stories:
    """The newest steps of the newest keys; oldest out first in both directions."""

    __slots__ = ("_by_key", "_keys_max", "_length_max")

    def __init__(self, *, keys_max: int, length_max: int) -> None:
        self._by_key: OrderedDict[Key, deque[Transition]] = OrderedDict()
        self._keys_max = keys_max
        self._length_max = length_max

    def add(self, key: Key, transition: Transition) -> None:
        """Append a step."""
        story = self._by_key.get(key)
        if story is None:
            story = self._by_key[key] = deque(maxlen=self._length_max)
            if len(self._by_key) > self._keys_max:
                self._by_key.popitem(last=False)
        story.append(transition)

    def of(self, key: Key) -> tuple[Transition, ...]:
        """The story of a key, oldest step first."""
        return tuple(self._by_key.get(key, ()))

    def all(self) -> Iterable[tuple[Key, tuple[Transition, ...]]]:
        """Every story that is still kept."""
        return [(key, tuple(story)) for key, story in self._by_key.items()]
