"""Who gets pages next: first come, first served, all or nothing.

The scan stops at the first that does not fit, so that a large request is never starved by small
ones behind it.

Policy `early`: decode reserves prompt and answer before prefill computes. A missing metadata slot
or missing pages are back-pressure, not errors; what can never fit is refused before it is queued.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from pdcluster_protocol.ids import Key
from pdcluster_protocol.pages import PagePool


class Need(msgspec.Struct, frozen=True):
    """What one key asks for."""

    pages: int
    slot: bool
    """Whether a metadata slot is needed as well."""


class Grant(msgspec.Struct, frozen=True):
    """What one key was given."""

    key: Key
    pages: tuple[int, ...]
    slot: int | None


class AdmissionQueue:
    """Waiting keys in order of arrival over one page pool and one slot pool."""

    __slots__ = ("_pool", "_slots", "_waiting")

    def __init__(self, pool: PagePool, slots: PagePool) -> None:
        self._pool = pool
        self._slots = slots
        self._waiting: OrderedDict[Key, Need] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    def waiting_keys(self) -> tuple[Key, ...]:
        """The keys in line."""
        return tuple(self._waiting)

    def add(self, key: Key, need: Need) -> None:
        """Queue a key."""
        self._waiting[key] = need

    def remove(self, key: Key) -> None:
        """Forget a key; unknown ones are fine."""
        self._waiting.pop(key, None)

    def head(self) -> Need | None:
        """What the first key in line waits for."""
        return next(iter(self._waiting.values()), None)

    def admit(self) -> Grant | None:
        """Reserve for the first key in line, or None when it must wait."""
        for key, need in self._waiting.items():
            if need.slot and self._slots.free_count == 0:
                return None
            pages = self._pool.reserve(key, need.pages)
            if pages is None:
                return None
            slot = None
            if need.slot:
                reserved = self._slots.reserve(key, 1)
                assert reserved is not None
                slot = reserved[0]
            del self._waiting[key]
            return Grant(key, pages, slot)
        return None


def input_tokens_max(capacity_tokens: int, *, shards: int, page_size: int) -> int:
    """The longest prompt that a pool of `capacity_tokens` takes (SGLang's `max_input_len`)."""
    if shards == 1:
        return capacity_tokens
    return (capacity_tokens - shards * page_size - 3) // page_size * page_size
