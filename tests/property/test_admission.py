"""Whoever comes and leaves: the order is kept, nobody gets a part, nobody waits without cause."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcluster_protocol.admission import AdmissionQueue, Need
from pdcluster_protocol.ids import Key
from pdcluster_protocol.pages import PagePool
from support.ledgers import key


class QueueMachine(RuleBasedStateMachine):
    """The queue against a list of who waits and two numbers of what is free."""

    @initialize(pages=st.integers(1, 12), slots=st.integers(1, 3))
    def make(self, pages: int, slots: int) -> None:
        self.pages, self.slots = pages, slots
        self.pool, self.slot_pool = PagePool(pages), PagePool(slots)
        self.queue = AdmissionQueue(self.pool, self.slot_pool)
        self.line: list[tuple[Key, Need]] = []
        self.running: dict[Key, Need] = {}
        self.rooms = 0

    def free(self) -> tuple[int, int]:
        taken = self.running.values()
        return (
            self.pages - sum(need.pages for need in taken),
            self.slots - sum(need.slot for need in taken),
        )

    @rule(share=st.floats(0, 1), slot=st.booleans())
    def come(self, share: float, slot: bool) -> None:
        self.rooms += 1
        need = Need(round(share * self.pages), slot)
        self.queue.add(key(self.rooms), need)
        self.line.append((key(self.rooms), need))

    @rule(place=st.integers(0, 20))
    def leave(self, place: int) -> None:
        if self.line:
            name, _ = self.line.pop(place % len(self.line))
            self.queue.remove(name)

    @rule()
    def admit(self) -> None:
        pages, slots = self.free()
        grant = self.queue.admit()
        if not self.line or self.line[0][1].pages > pages or (self.line[0][1].slot and not slots):
            assert grant is None
            return
        name, need = self.line.pop(0)
        assert grant is not None
        assert (name, need.pages, need.slot) == (
            grant.key,
            len(grant.pages),
            grant.slot is not None,
        )
        self.running[name] = need

    @rule(oldest=st.booleans())
    def finish(self, oldest: bool) -> None:
        if self.running:
            name = list(self.running)[0 if oldest else -1]
            del self.running[name]
            self.pool.release(name)
            self.slot_pool.release(name)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        self.slot_pool.check()
        assert self.free() == (self.pool.free_count, self.slot_pool.free_count)
        assert len(self.line) == len(self.queue)
        assert (self.line[0][1] if self.line else None) == self.queue.head()

    def teardown(self) -> None:
        """What could be queued is served in the end."""
        if not hasattr(self, "queue"):
            return
        while self.running:
            self.finish(oldest=True)
        while self.line:
            self.admit()
            self.finish(oldest=True)


QueueMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestQueue = QueueMachine.TestCase
