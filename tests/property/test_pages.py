"""Any history of a pool agrees with a model of three kinds of sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcluster_protocol.errors import InvariantViolated
from pdcluster_protocol.ids import Key
from pdcluster_protocol.pages import PagePool
from support.ledgers import key

ROOMS = range(1, 6)
keys = st.sampled_from([key(room) for room in ROOMS])


class PoolMachine(RuleBasedStateMachine):
    """The pool against plain sets of page numbers."""

    @initialize(size=st.sampled_from((0, 1, 9, 24)), seed=st.none() | st.integers(0, 99))
    def make(self, size: int, seed: int | None) -> None:
        self.pool = PagePool(size, scatter_seed=seed)
        self.free = set(range(size))
        self.owned: dict[Key, set[int]] = {}
        self.quarantined: dict[Key, set[int]] = {}
        self.waits: dict[Key, float] = {}
        self.needs_fence: set[Key] = set()
        self.epoch = 0
        self.now = 0.0

    def to_free(self, name: Key) -> None:
        self.free |= self.quarantined.pop(name)
        self.needs_fence.discard(name)
        del self.waits[name]

    @rule(name=keys, count=st.integers(0, 8))
    def reserve(self, name: Key, count: int) -> None:
        if name in self.owned or name in self.quarantined:
            with pytest.raises(InvariantViolated):
                self.pool.reserve(name, count)
            return
        pages = self.pool.reserve(name, count)
        assert (pages is None) is (count > len(self.free))
        if pages is not None:
            assert count == len(pages) == len(set(pages))
            assert set(pages) <= self.free
            self.free -= set(pages)
            self.owned[name] = set(pages)
            assert self.pool.epoch > self.epoch
        self.epoch = self.pool.epoch

    @rule()
    def reserve_for_all(self) -> None:
        for room in ROOMS:
            if not self.pool.holds(key(room)):
                self.reserve(key(room), 1 + room % 3)

    @rule(name=keys)
    def release(self, name: Key) -> None:
        if name in self.quarantined:
            with pytest.raises(InvariantViolated):
                self.pool.release(name)
            return
        self.pool.release(name)
        self.free |= self.owned.pop(name, set())

    @rule(name=keys, needs_fence=st.booleans())
    def quarantine(self, name: Key, needs_fence: bool) -> None:
        self.now += 1.0
        self.pool.quarantine(name, self.now, needs_fence=needs_fence)
        if name in self.owned:
            self.quarantined[name] = self.owned.pop(name)
            self.waits[name] = self.now
        if name in self.quarantined and needs_fence:
            self.needs_fence.add(name)

    @rule(name=keys)
    def absolve(self, name: Key) -> None:
        self.pool.absolve(name)
        if name in self.quarantined:
            self.to_free(name)

    @rule()
    def fence(self) -> None:
        assert set(self.quarantined) == set(self.pool.absolve_fenced())
        for name in list(self.quarantined):
            self.to_free(name)

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check()
        assert len(self.free) == pool.free_count
        assert sum(map(len, self.owned.values())) == pool.owned_count
        assert sum(map(len, self.quarantined.values())) == pool.quarantined_count
        pages = sum(len(self.quarantined[name]) for name in self.needs_fence)
        oldest = min((self.waits[name] for name in self.needs_fence), default=None)
        assert (pages, oldest) == pool.waiting_for_fence()
        for name in map(key, ROOMS):
            assert (name in self.owned or name in self.quarantined) is pool.holds(name)


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestPool = PoolMachine.TestCase
