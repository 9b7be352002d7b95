"""The watch of members over canned calls: what is used, what is told, what is blamed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdcluster_protocol.config import Member, RouterConfig
from pdcluster_protocol.control_api import LoadReport
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.messages import InstanceCard, Load, RankCard
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from pdcluster_sidecar.router.calls import CallFailed
from pdcluster_sidecar.router.members import Members
from pdcluster_sidecar.router.tokens import TokenizerAnswer
from support.canned import byte_tokenizer

ADDRESS = RankAddress("127.64.0.9", 8998)
TOKENIZER = TokenizerAnswer(
    "t1",
    {
        "tokenizer.json": base64.b64encode(byte_tokenizer().to_str().encode()).decode(),
        "tokenizer_config.json": base64.b64encode(b"{}").decode(),
    },
)


class Calls:
    """One sidecar whose answers a test changes; each load call is a turn of the watch."""

    def __init__(self) -> None:
        self.card = InstanceCard(
            cluster="c",
            instance="p0",
            role="prefill",
            incarnation="i1",
            session="s",
            http=ADDRESS,
            ranks=(
                RankCard(RankCoordinate(dp=1), ADDRESS, 30001),
                RankCard(RankCoordinate(dp=0), ADDRESS, 30000),
            ),
            parallel=Parallelism(tp=2, dp=2),
            fingerprint="f",
            ready=True,
        )
        self.report = LoadReport("i1", True, False, (Load(pages_free=1), Load(pages_free=2)))
        self.fault: Exception | None = None
        self.tokenizers = 0
        self.turns = 0
        self.held = 0
        """Calls that wait for news."""
        self.news = asyncio.Event()
        self.turned = asyncio.Condition()
        self.answering = asyncio.Event()
        self.answering.set()

    async def hello(self, address: RankAddress, ours: InstanceCard) -> InstanceCard:
        assert (ADDRESS, "router") == (address, ours.role)
        return self.card

    async def load(self, address: RankAddress) -> LoadReport:
        async with self.turned:
            self.turns += 1
            self.turned.notify_all()
        await self.answering.wait()
        if self.fault is not None:
            raise self.fault
        return self.report

    async def held_load(self, address: RankAddress, incarnation: str) -> LoadReport:
        """Held until the watch or a test ends it."""
        assert incarnation in {"i1", "i2"}
        self.held += 1
        try:
            async with self.turned:
                self.turned.notify_all()
            await self.news.wait()
            return await self.load(address)
        finally:
            self.held -= 1

    async def tokenizer(self, address: RankAddress) -> TokenizerAnswer:
        self.tokenizers += 1
        return TOKENIZER


class Watch:
    """Members over `Calls`, with a clock that a test moves."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.at = 100.0
        self.told: list[tuple[str, ...]] = []
        config = RouterConfig(
            cluster="c",
            keys_folder="",
            served_name="m",
            max_context=8,
            members=(Member(instance="p0", role=Role.PREFILL, host=ADDRESS.host),),
        )
        ours = InstanceCard("c", "router-0", "router", "", "s", ADDRESS)
        self.members = Members(config, self.calls, ours=ours, now=lambda: self.at)
        self.members.on_change = self._look
        self.members.on_dead = self._note_death
        self.usable_at_change: list[str] = []
        self.usable_at_death: list[str] | None = None
        self.members.on_silent = lambda incarnation: self.told.append(("silent", incarnation))
        self.members.on_heard = lambda incarnation: self.told.append(("heard", incarnation))

    async def turn(self) -> None:
        """One look that began after now."""
        self.members.hurry()
        async with asyncio.timeout(10), self.calls.turned:
            seen = self.calls.turns
            await self.calls.turned.wait_for(lambda: self.calls.turns >= seen + 1)
        for _ in range(5):
            await asyncio.tasks.sleep(0)
        # As every request does: what it was told must not stay when something changes.
        self.members.candidates()

    async def held(self) -> None:
        """Until a call is held."""
        async with asyncio.timeout(10), self.calls.turned:
            await self.calls.turned.wait_for(lambda: self.calls.held == 1)

    def _look(self) -> None:
        self.usable_at_change = [each.incarnation for each in self.members.candidates()]

    def _note_death(self, incarnation: str, _detail: str) -> None:
        self.told.append(("dead", incarnation))
        self.usable_at_death = [each.incarnation for each in self.members.candidates()]

    def change(self, **report: Any) -> None:
        self.calls.report = msgspec.structs.replace(self.calls.report, **report)

    @property
    def problem(self) -> str:
        return self.members.views()[0].problem


@asynccontextmanager
async def watching(**card: Any) -> AsyncIterator[Watch]:
    watch = Watch()
    watch.calls.card = msgspec.structs.replace(watch.calls.card, **card)
    watch.members.start()
    try:
        if not card:
            await asyncio.wait_for(watch.members.codec_known.wait(), 10)
            await watch.turn()
        yield watch
    finally:
        await watch.members.close()


async def test_a_member_is_used_with_a_slot_for_each_dp_rank() -> None:
    async with watching() as watch:
        (candidate,) = watch.members.candidates()

        assert [(0, 30000, 1), (1, 30001, 2)] == [
            (slot.dp_rank, slot.address.port, slot.load.pages_free) for slot in candidate.slots
        ]
        assert ("i1", "f", "t1", 2) == (
            candidate.incarnation,
            candidate.fingerprint,
            candidate.digest,
            candidate.dp_size,
        )
        assert 1 == watch.calls.tokenizers
        assert "" == watch.problem


async def test_who_has_waited_for_a_tokenizer_finds_it_at_once() -> None:
    watch = Watch()
    assert watch.members.codec() is None
    watch.calls.answering.clear()
    watch.members.start()
    try:
        await asyncio.wait_for(watch.members.codec_known.wait(), 10)
        codec = watch.members.codec()
        assert codec is not None
        assert "t1" == codec.digest
    finally:
        await watch.members.close()


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"cluster": "other"}, "other/p0/prefill"),
        ({"instance": "p9"}, "c/p9/prefill"),
        ({"role": "decode"}, "c/p0/decode"),
        ({"wire_min": 2, "wire_max": 3}, "wire 2 to 3"),
        ({"incarnation": ""}, "not ready"),
        ({"ready": False}, "not ready"),
        ({"ranks": ()}, "0 of its 2 ranks"),
    ],
)
async def test_a_card_that_does_not_fit_is_a_named_problem(card: dict[str, Any], said: str) -> None:
    async with watching(**card) as watch:
        async with asyncio.timeout(10):
            while watch.problem == "no hello yet":
                await asyncio.tasks.sleep(0)

        assert said in watch.problem
        assert [] == watch.members.candidates()


@pytest.mark.parametrize("report", [{"ready": False}, {"draining": True}])
async def test_who_is_not_ready_or_drains_gets_nothing_new(report: dict[str, Any]) -> None:
    async with watching() as watch:
        watch.change(**report)
        await watch.turn()

        assert [] == watch.members.candidates()
        assert [] == watch.told


async def test_a_drain_is_known_as_soon_as_the_call_that_is_held_says_so() -> None:
    async with watching() as watch:
        await watch.held()
        watch.change(draining=True)
        watch.calls.news.set()
        async with asyncio.timeout(10):
            while watch.members.candidates():
                await asyncio.tasks.sleep(0)
        assert "it is draining" == watch.problem
        assert "p0: it is draining" == watch.members.shortage()
        assert [] == watch.told


async def test_one_that_drains_for_long_is_not_silent() -> None:
    async with watching() as watch:
        watch.change(draining=True)
        await watch.turn()
        for _ in range(3):
            watch.at += 9.0
            await watch.turn()
        assert [] == watch.told


async def test_blame_and_haste_do_not_wait_for_a_call_that_is_held() -> None:
    async with watching() as watch:
        for hurry in (watch.members.hurry, lambda: watch.members.blame("p0")):
            await watch.held()
            seen = watch.calls.turns
            hurry()
            watch.at += 0.01
            # Less than the call would be held, and than a pause is long.
            async with asyncio.timeout(0.9):
                while watch.calls.turns == seen:
                    await asyncio.tasks.sleep(0)
        await watch.held()
        assert "" == watch.problem
        assert 1 == len(watch.members.candidates())


async def test_another_incarnation_means_that_the_old_one_is_dead() -> None:
    async with watching() as watch:
        watch.change(incarnation="i2")
        watch.calls.card = msgspec.structs.replace(watch.calls.card, incarnation="i2")
        await watch.turn()
        assert [("dead", "i1")] == watch.told
        assert [] == watch.usable_at_death

        await watch.turn()
        assert ["i2"] == [candidate.incarnation for candidate in watch.members.candidates()]
        assert ["i2"] == watch.usable_at_change
        # The fingerprint is the same, so is the tokenizer; who forgot it fetches it again.
        assert watch.calls.tokenizers <= 2


async def test_silence_is_unknown_first_then_told_once_and_ends_with_a_report() -> None:
    async with watching() as watch:
        watch.calls.fault = CallFailed("it does not answer")
        watch.at += 1.9
        await watch.turn()
        assert 1 == len(watch.members.candidates())
        watch.at += 0.2
        assert [] == watch.members.candidates()
        assert [] == watch.told

        watch.at += 9.0
        await watch.turn()
        await watch.turn()
        assert [("silent", "i1")] == watch.told

        watch.calls.fault = None
        await watch.turn()
        assert [("silent", "i1"), ("heard", "i1")] == watch.told
        assert 1 == len(watch.members.candidates())


async def test_a_fault_of_our_own_is_named_and_does_not_end_the_watch() -> None:
    async with watching() as watch:
        watch.calls.fault = ZeroDivisionError("planted")
        await watch.turn()
        assert "looking at it failed here; the router's log says how" == watch.problem
        watch.calls.fault = None
        await watch.turn()
        assert "" == watch.problem
        assert 1 == len(watch.members.candidates())


async def test_a_hung_engine_is_silence_although_its_sidecar_speaks() -> None:
    async with watching() as watch:
        watch.change(ready=False)
        watch.at += 11.0
        await watch.turn()

        assert [("silent", "i1")] == watch.told


async def test_blame_lasts_until_a_report_that_was_asked_for_afterwards() -> None:
    async with watching() as watch:
        watch.members.blame("p0")
        watch.members.blame("a stranger")
        assert [] == watch.members.candidates()

        watch.at += 0.01
        await watch.turn()
        assert 1 == len(watch.members.candidates())
