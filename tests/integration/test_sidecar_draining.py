"""An engine that drains, as its sidecar passes it on: to routers, to peers, to the other ranks."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest_asyncio

from pdcluster_protocol.control_api import LoadReport
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Role
from pdcluster_protocol.messages import Drain, InstanceCard, Resolve, Resolved
from support.pods import Instance
from support.promptness import PROMPT_SECONDS
from support.sidecars import FakeEngine, SidecarProcess, running, until

BEGUN = Drain(Reason.SHUTTING_DOWN)
DONE = Drain(Reason.SHUTTING_DOWN, done=True)


@pytest_asyncio.fixture
async def prefill(tmp_path: Path) -> AsyncIterator[tuple[SidecarProcess, FakeEngine]]:
    sidecar = SidecarProcess(tmp_path / "p", Role.PREFILL)
    engine = FakeEngine(sidecar.config)
    async with running(sidecar):
        await engine.open()
        yield sidecar, engine
        await engine.die()


async def report(sidecar: SidecarProcess, incarnation: str = "") -> LoadReport:
    """Its load; with the incarnation that is known, held until it is not ready any more."""
    target = f"/pd/v1/load?while_ready={incarnation}" if incarnation else "/pd/v1/load"
    status, raw = await sidecar.call("GET", target, signed=True)
    assert 200 == status
    return msgspec.json.decode(raw, type=LoadReport)


async def held(sidecar: SidecarProcess, engine: FakeEngine) -> asyncio.Task[LoadReport]:
    """A call that is being held: a plain one that came later is answered before."""
    assert engine.answer is not None
    call = asyncio.create_task(report(sidecar, engine.answer.incarnation))
    assert (await report(sidecar)).ready
    assert not call.done()
    return call


async def test_a_router_that_waits_hears_it_and_who_is_running_is_not_sent_away(
    prefill: tuple[SidecarProcess, FakeEngine],
) -> None:
    sidecar, engine = prefill
    call = await held(sidecar, engine)
    engine.pulse(draining=True, rooms=1)
    told = await call

    assert (True, True) == (told.ready, told.draining)
    status, raw = await sidecar.call("GET", "/ready")
    assert (503, "this instance is draining") == (status, json.loads(raw)["detail"])
    assert 200 == (await sidecar.call("GET", "/health"))[0]
    # Of one that drains already nothing is held back.
    assert engine.answer is not None
    assert (await report(sidecar, engine.answer.incarnation)).draining


async def test_a_router_that_waits_hears_of_a_death_too(
    prefill: tuple[SidecarProcess, FakeEngine],
) -> None:
    sidecar, engine = prefill
    call = await held(sidecar, engine)
    await engine.die()

    assert ("", False) == ((await call).incarnation, (await call).ready)


async def test_a_sidecar_that_is_told_to_stop_holds_nobody_and_ends_no_engine(
    prefill: tuple[SidecarProcess, FakeEngine],
) -> None:
    sidecar, engine = prefill
    call = await held(sidecar, engine)
    began = time.monotonic()
    assert 0 == await sidecar.stop(signal.SIGTERM)
    assert (await call).ready
    assert time.monotonic() - began < PROMPT_SECONDS

    assert engine.answer is not None
    again = FakeEngine(sidecar.config, incarnation=engine.answer.incarnation, session="engine")
    starting = asyncio.create_task(sidecar.start())
    await until(lambda: _greeted(again))
    await starting
    assert engine.answer.incarnation == (await report(sidecar)).incarnation
    await again.die()


async def _greeted(engine: FakeEngine) -> bool:
    try:
        return not (await engine.open()).refused
    except OSError:
        return False


async def test_a_peer_hears_it_and_still_learns_who_it_is(
    tmp_path: Path, prefill: tuple[SidecarProcess, FakeEngine]
) -> None:
    theirs, engine = prefill
    early, late = (SidecarProcess(tmp_path / f"d{n}", Role.DECODE) for n in (0, 1))
    async with running(early, late):
        [known_before, met_later] = [FakeEngine(sidecar.config) for sidecar in (early, late)]
        await known_before.open()
        await met_later.open()
        assert not (await card_of(theirs, known_before)).draining
        engine.pulse(draining=True, rooms=1)

        async def told() -> bool:
            _, raw = await early.call("GET", "/pd/v1/dump", signed=True)
            return bool(json.loads(raw)["peers"][0]["draining"])

        await until(told)
        for asking in (known_before, met_later):
            card = await card_of(theirs, asking)
            assert (engine.address, True) == (card.ranks[0].address, card.ready)
            await asking.die()


async def card_of(sidecar: SidecarProcess, asking: FakeEngine) -> InstanceCard:
    asking.send(Resolve(*msgspec.to_builtins(sidecar.http)))
    card = (await asking.receive(Resolved)).card
    assert card is not None
    return card


async def test_one_rank_drains_all_pods_and_none_leaves_before_the_last_room(
    tmp_path: Path,
) -> None:
    instance = Instance(tmp_path, Role.PREFILL)
    async with running(instance.leader, instance.other):
        zero, one = await instance.join()
        await until(instance.ready)
        call = await held(instance.leader, zero)
        one.pulse(draining=True, rooms=0)

        assert (await call).draining
        assert BEGUN == await zero.receive(Drain)
        statuses = [
            (await sidecar.call("GET", "/ready"))[0]
            for sidecar in (instance.leader, instance.other)
        ]
        assert [503, 503] == statuses
        zero.pulse(draining=True, rooms=2)
        assert (await report(instance.leader)).draining
        assert not any(engine.has(Drain, DONE) for engine in (zero, one))

        zero.pulse(draining=True, rooms=0)
        for engine in (zero, one):
            assert DONE == await engine.receive(Drain, lambda order: order.done)
        await instance.die()
