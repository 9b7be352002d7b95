"""Who owns which page: `free → owned(key) → free`, or `owned(key) → quarantined(key) → free`.

All or nothing per key. A page leaves quarantine only by proof that nobody writes or reads it any
more; a timeout is not proof, it is the reason to fence. The pool does not know what proof is: it
offers `absolve` (proof for one key) and `absolve_fenced` (a fence is proof for every key that was
locked before it), and its caller must not call them without.

The same class owns metadata slots: a slot is a page of another pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec

from pdcluster_protocol.errors import InvariantViolated
from pdcluster_protocol.ids import Key

RUNS_SHOWN_MAX = 128


class Holding(msgspec.Struct):
    """The pages of one key; `since` is when they went to quarantine."""

    pages: tuple[int, ...]
    epoch: int
    since: float | None = None
    needs_fence: bool = False
    condemned: bool = False


class PagePool:
    """A pool of `size` pages, numbered from 0, that hands out long runs first.

    With `scatter_seed` pages are handed out one by one in a shuffled order: tests use it to show
    that nothing depends on neighbouring numbers.
    """

    __slots__ = (
        "_extents",
        "_holdings",
        "_scatter",
        "epoch",
        "free_count",
        "quarantined_count",
        "size",
    )

    def __init__(self, size: int, *, scatter_seed: int | None = None) -> None:
        self.size = size
        self.free_count = size
        self.quarantined_count = 0
        """Pages that wait for proof."""
        self.epoch = 0
        self._holdings: dict[Key, Holding] = {}
        self._extents: list[tuple[int, int]] = [(0, size)] if size and scatter_seed is None else []
        self._scatter = None if scatter_seed is None else _shuffled(size, scatter_seed)

    @property
    def owned_count(self) -> int:
        """Pages in use."""
        return self.size - self.free_count - self.quarantined_count

    def holds(self, key: Key) -> bool:
        """Whether the key has pages, owned or quarantined."""
        return key in self._holdings

    def held_keys(self) -> tuple[Key, ...]:
        """Every key that has pages."""
        return tuple(self._holdings)

    def holder_of(self, page: int) -> Key | None:
        """Who holds a page; for checks, since it searches."""
        return next((key for key, held in self._holdings.items() if page in held.pages), None)

    def pages_of(self, key: Key) -> tuple[int, ...]:
        """The key's pages in the order of its tokens; empty when it has none."""
        holding = self._holdings.get(key)
        return () if holding is None else holding.pages

    def is_quarantined(self, key: Key) -> bool:
        """Whether the key's pages wait for proof."""
        holding = self._holdings.get(key)
        return holding is not None and holding.since is not None

    def awaits_fence(self, key: Key) -> bool:
        """Whether only a fence can free the key's pages (in time)."""
        holding = self._holdings.get(key)
        return holding is not None and holding.needs_fence

    def reserve(self, key: Key, count: int) -> tuple[int, ...] | None:
        """`count` pages for `key`, or None when there are not enough free ones.

        Raises:
            InvariantViolated: the key has pages already (our own bug).
        """
        if key in self._holdings:
            raise InvariantViolated("a key reserves its pages once", key=key)
        if count > self.free_count:
            return None
        pages = self._take(count)
        self.free_count -= count
        self.epoch += 1
        self._holdings[key] = Holding(pages, self.epoch)
        return pages

    def release(self, key: Key) -> None:
        """Give owned pages back: their owner is done and nobody else ever wrote to them.

        Raises:
            InvariantViolated: the key's pages are quarantined.
        """
        holding = self._holdings.get(key)
        if holding is None:
            return
        if holding.since is not None:
            raise InvariantViolated("quarantined pages leave by proof only", key=key)
        self._free(key)

    def quarantine(self, key: Key, now: float, *, needs_fence: bool = False) -> None:
        """Lock the key's pages until proof; `needs_fence` when no acknowledgement can come."""
        holding = self._holdings.get(key)
        if holding is None:
            return
        self._lock(holding, now)
        holding.needs_fence = holding.needs_fence or needs_fence

    def condemn(self, key: Key, now: float) -> None:
        """Lock the key's pages for ever: a fault of ours, and nobody knows who still uses them."""
        holding = self._holdings.get(key)
        if holding is not None:
            self._lock(holding, now)
            holding.condemned, holding.needs_fence = True, False

    def is_condemned(self, key: Key) -> bool:
        """Whether nothing but the end of the process frees the key's pages."""
        holding = self._holdings.get(key)
        return holding is not None and holding.condemned

    def absolve(self, key: Key) -> None:
        """Proof for one key: free its quarantined pages."""
        holding = self._holdings.get(key)
        if holding is not None and holding.since is not None and not holding.condemned:
            self._free(key)

    def absolve_fenced(self, *, locked_before: float = inf) -> list[Key]:
        """A fence is complete: free every key that has waited in quarantine since before it."""
        keys = [
            key
            for key, holding in self._holdings.items()
            if holding.since is not None and holding.since < locked_before and not holding.condemned
        ]
        for key in keys:
            self._free(key)
        return keys

    def waiting_for_fence(self) -> tuple[int, float | None]:
        """How many pages only a fence can free, and since when the oldest of them waits."""
        waiting = [h for h in self._holdings.values() if h.since is not None and h.needs_fence]
        since = [h.since for h in waiting if h.since is not None]
        return sum(len(h.pages) for h in waiting), min(since, default=None)

    def check(self) -> None:
        """Every page is in exactly one place.

        Raises:
            InvariantViolated: with the pages that are lost or held twice.
        """
        held = [page for holding in self._holdings.values() for page in holding.pages]
        free = list(self._free_pages())
        every = sorted(held + free)
        if every != list(range(self.size)):
            twice = sorted({page for page in every if every.count(page) > 1})
            lost = sorted(set(range(self.size)) - set(every))
            raise InvariantViolated(f"pages held twice: {twice[:8]}, lost: {lost[:8]}")
        if len(free) != self.free_count:
            raise InvariantViolated(f"{len(free)} pages are free, {self.free_count} are counted")
        locked = sum(len(h.pages) for h in self._holdings.values() if h.since is not None)
        if locked != self.quarantined_count:
            raise InvariantViolated(
                f"{locked} pages are quarantined, {self.quarantined_count} are counted"
            )

    def _lock(self, holding: Holding, now: float) -> None:
        if holding.since is None:
            holding.since = now
            self.quarantined_count += len(holding.pages)

    def _free_pages(self) -> Iterable[int]:
        if self._scatter is not None:
            return self._scatter
        return (p for start, length in self._extents for p in range(start, start + length))

    def _take(self, count: int) -> tuple[int, ...]:
        if self._scatter is not None:
            taken, self._scatter = self._scatter[:count], self._scatter[count:]
            return tuple(taken)
        pages: list[int] = []
        for start, length in sorted(self._extents, key=lambda e: (-e[1], e[0])):
            take = min(length, count - len(pages))
            if take == 0:
                break
            pages.extend(range(start, start + take))
            self._extents.remove((start, length))
            if take < length:
                self._extents.append((start + take, length - take))
        self._extents.sort()
        return tuple(pages)

    def _free(self, key: Key) -> None:
        holding = self._holdings.pop(key)
        pages = holding.pages
        self.free_count += len(pages)
        if holding.since is not None:
            self.quarantined_count -= len(pages)
        if self._scatter is not None:
            self._scatter.extend(pages)
            return
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._extents, *_extents_of(pages)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._extents = merged


def page_runs(pages: tuple[int, ...]) -> str:
    """Pages in their order as text for people, such as `3-7 12`; cut after `RUNS_SHOWN_MAX`."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] + 1 == page:
            runs[-1] = (runs[-1][0], page)
        else:
            runs.append((page, page))
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:RUNS_SHOWN_MAX]]
    return " ".join([*shown, "..."] if len(runs) > RUNS_SHOWN_MAX else shown)


def _extents_of(pages: tuple[int, ...]) -> list[tuple[int, int]]:
    extents: list[tuple[int, int]] = []
    for page in sorted(pages):
        if extents and extents[-1][0] + extents[-1][1] == page:
            extents[-1] = (extents[-1][0], extents[-1][1] + 1)
        else:
            extents.append((page, 1))
    return extents


def _shuffled(size: int, seed: int) -> list[int]:
    """A permutation by a linear congruential generator: the core rolls no dice of its own."""
    state = seed & 0xFFFFFFFFFFFFFFFF
    pages = list(range(size))
    for index in range(size - 1, 0, -1):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        other = (state >> 33) % (index + 1)
        pages[index], pages[other] = pages[other], pages[index]
    return pages
