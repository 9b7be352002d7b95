"""Whatever is announced, repeated, lost and hashed in whatever order: complete means complete."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcluster_protocol.effects import VerifyRun
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.messages import KVPoll, Run, RunsLanded, Status
from pdcluster_protocol.push.landing import Landing
from support.ledgers import LAYOUT, SLOTS, joined_ledger, key, whole_planner

SLOT = 2


class LandingMachine(RuleBasedStateMachine):
    """One landing against three plain sets: announced, asked and verified runs.

    Two ranks write disjoint regions, as pipeline ranks do.
    """

    @initialize(pages=st.permutations(range(16)), tokens=st.integers(1, 30), order=st.randoms())
    def make(self, pages: list[int], tokens: int, order: Any) -> None:
        self.ledger: Ledger = joined_ledger()
        self.tokens, self.pages = tokens, tuple(pages[: LAYOUT.pages_for(tokens)])
        self.landing = Landing(
            self.ledger,
            self.ledger.ranks[0],
            pages=tuple(pages),
            slot=SLOT,
            prompt_tokens=tokens,
            ranks=frozenset((0, 1)),
        )
        self.runs = {0: self.cut((0, 1), order), 1: self.cut((2, 3, 4), order)}
        self.announced: set[tuple[int, int]] = set()
        self.asked: dict[int, tuple[int, int]] = {}
        self.verified: set[tuple[int, int]] = set()
        self.said: set[int] = set()

    def cut(self, regions: tuple[int, ...], order: Any) -> list[Run]:
        """The runs of some regions and metadata buffers, numbered as they happened to land."""
        planner = whole_planner(
            LAYOUT,
            prompt_tokens=self.tokens,
            sources=range(len(self.pages)),
            targets=self.pages,
            bytes_max=60,
        )
        for region in regions:
            if region < len(LAYOUT.regions):
                planner.rows_written(region, self.tokens)
        runs = [
            Run(0, run.region, run.first_page, run.pages, run.nbytes, 0)
            for run in iter(planner.next, None)
        ]
        rows = [
            Run(0, region, SLOT, 1, SLOTS.rows[region - 3], 0) for region in regions if region >= 3
        ]
        order.shuffle(runs)
        return [
            msgspec.structs.replace(run, index=index, digest=1000 + index)
            for index, run in enumerate(runs + rows)
        ]

    def collect(self, names: list[tuple[int, int]]) -> None:
        """Every name is asked for exactly once, with the bytes of its run."""
        effects = [e for e in self.ledger.take_effects() if isinstance(e, VerifyRun)]
        assert len(names) == len(effects)
        for name, effect in zip(names, effects, strict=True):
            assert self.runs[name[0]][name[1]].nbytes == effect.nbytes
            self.asked[effect.operation] = name

    @rule(rank=st.sampled_from((0, 1)), start=st.integers(0, 30), count=st.integers(0, 9))
    def announce(self, rank: int, start: int, count: int) -> None:
        """Repeats and overlaps are normal: messages are lost and sent again."""
        runs = tuple(self.runs[rank][start : start + count])
        assert "" == self.landing.announce(RunsLanded(key(), rank, 1, runs))
        fresh = [(rank, run.index) for run in runs if (rank, run.index) not in self.announced]
        self.announced.update(fresh)
        self.collect(fresh)

    @rule(rank=st.sampled_from((0, 1)))
    def announce_all(self, rank: int) -> None:
        self.announce(rank, 0, len(self.runs[rank]))

    @rule(rank=st.sampled_from((0, 1)))
    def succeed(self, rank: int) -> None:
        self.said.add(rank)
        self.landing.succeeded(Status(key(), KVPoll.SUCCESS, rank, runs=len(self.runs[rank])))

    @rule(place=st.integers(0, 60), count=st.integers(1, 30))
    def hash(self, place: int, count: int) -> None:
        for _ in range(min(count, len(self.asked))):
            operation = sorted(self.asked)[place % len(self.asked)]
            rank, index = self.asked.pop(operation)
            digest = self.runs[rank][index].digest
            assert self.landing.verified(operation, digest) is None
            self.verified.add((rank, index))

    @rule()
    def lose_the_transport(self) -> None:
        before = self.asked
        self.asked = {}
        self.landing.restart()
        self.collect(list(before.values()))
        for operation in before:
            assert self.landing.verified(operation, 0) is None

    @rule(rank=st.sampled_from((0, 1)), place=st.integers(0, 60), other=st.integers(0, 999))
    def announce_another_run_under_a_known_number(self, rank: int, place: int, other: int) -> None:
        known = [index for owner, index in sorted(self.announced) if owner == rank]
        if known:
            run = self.runs[rank][known[place % len(known)]]
            changed = msgspec.structs.replace(run, digest=other)
            fault = self.landing.announce(RunsLanded(key(), rank, 1, (changed,)))
            assert "announced twice, unequal" in fault
            assert [] == self.ledger.take_effects()

    @invariant()
    def complete_means_complete(self) -> None:
        every = {(rank, run.index) for rank, runs in self.runs.items() for run in runs}
        assert (self.said == {0, 1} and self.verified == every) is self.landing.complete
        assert (self.announced == every) is (self.landing.coverage_fault() == "")
        assert set(self.asked) == set(self.landing.operations())


LandingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLanding = LandingMachine.TestCase
