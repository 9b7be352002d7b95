"""An instance of two pods, seen from its own side: who joins, who ends, who is asked."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import structlog

from pdcluster_protocol.control_api import (
    AbortRequest,
    OrdersAsked,
    PodAnswer,
    PodCard,
    PodReport,
    decode_pod_body,
)
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import (
    CancelLeg,
    DumpAnswered,
    DumpRequested,
    InstanceCard,
)
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar.sidecar import Sidecar
from support.pods import Instance
from support.sidecars import (
    DEADLINE_SECONDS,
    RING,
    FakeEngine,
    SidecarProcess,
    hello_of,
    running,
    until,
)


@pytest_asyncio.fixture
async def instance(tmp_path: Path) -> AsyncIterator[Instance]:
    made = Instance(tmp_path, Role.PREFILL)
    async with running(made.leader, made.other):
        yield made
        await made.die()


async def test_ranks_of_both_pods_are_one_instance_with_the_leaders_incarnation(
    instance: Instance,
) -> None:
    zero, one = await instance.join()
    await until(instance.ready)

    hosts = (instance.leader.config.host, instance.other.config.host)
    assert [(hosts[0], 9000), (hosts[1], 9001)] == [
        (engine.address.host, engine.address.port) for engine in (zero, one)
    ]
    for dp, host in enumerate(hosts):
        query = f"prefill_dp_rank={dp}&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
        status, raw = await instance.leader.call("GET", f"/route?{query}", signed=True)
        assert (200, {"rank_ip": host, "rank_port": 9000 + dp}) == (status, json.loads(raw))

    async def loaded() -> bool:
        _, raw = await instance.leader.call("GET", "/pd/v1/load", signed=True)
        report = json.loads(raw)
        return (True, [7, 7]) == (report["ready"], [load["pages_free"] for load in report["loads"]])

    await until(loaded)


async def test_a_rank_waits_for_a_leader_that_is_not_there_yet(instance: Instance) -> None:
    await instance.leader.stop(signal.SIGKILL)
    one = instance.engine(1)
    opening = asyncio.create_task(one.open())
    await instance.leader.start()

    assert "" == (await opening).refused
    zero = instance.engine(0)
    assert one.answer is not None
    assert one.answer.incarnation == (await zero.open()).incarnation


async def test_a_report_whose_answer_was_lost_is_told_again_and_ends_nothing(
    instance: Instance,
) -> None:
    leader = instance.leader
    pod = PodCard(1, instance.other.http, leader.signer.session)
    hello = hello_of(instance.other.config, coordinate=RankCoordinate(dp=1))
    report = PodReport(cluster="c", instance="c-prefill-0", pod=pod, hellos=(hello,))
    body = msgspec.msgpack.encode(report)
    answers = []
    for _ in range(2):
        _, raw = await leader.call("POST", "/pd/v1/pod/report", body, signed=True)
        answers.append(decode_pod_body(raw, PodAnswer).answers)

    assert answers[0] == answers[1]
    assert "" != answers[0][0][1].incarnation


async def test_a_rank_of_the_leader_cannot_join_at_the_other_pod(instance: Instance) -> None:
    stray = FakeEngine(instance.other.config, coordinate=RankCoordinate(dp=0))
    assert "that rank belongs to pod 0" in (await stray.open()).refused
    await stray.die()
    odd = FakeEngine(instance.other.config, coordinate=RankCoordinate(dp=1), fingerprint="g")
    assert "fingerprint is 'g'" in (await odd.open()).refused
    await odd.die()


@pytest.mark.parametrize("dying", [0, 1])
async def test_the_death_of_one_rank_ends_the_ranks_of_both_pods(
    instance: Instance, dying: int
) -> None:
    engines = await instance.join()
    assert engines[0].answer is not None
    old = engines[0].answer.incarnation
    await engines[dying].die()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await engines[1 - dying].closed.wait()

    late = instance.engine(1 - dying, incarnation=old)
    assert "start anew" in (await late.open()).refused
    zero, _ = await instance.join()
    assert zero.answer is not None
    assert zero.answer.incarnation != old
    await until(instance.ready)


@pytest.mark.parametrize("killed", ["leader", "other"])
async def test_a_restarted_sidecar_ends_nothing(instance: Instance, killed: str) -> None:
    engines = await instance.join()
    await until(instance.ready)
    assert engines[0].answer is not None
    old = engines[0].answer.incarnation
    index = ("leader", "other").index(killed)
    sidecar: SidecarProcess = getattr(instance, killed)
    await sidecar.stop(signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await engines[index].closed.wait()
    await sidecar.start()

    again = instance.engine(index, incarnation=old)
    assert (old, "") == ((await again.open()).incarnation, again.answer and again.answer.refused)
    await until(instance.ready)
    assert not engines[1 - index].closed.is_set()


@pytest.mark.parametrize("killed", ["leader", "other"])
async def test_a_restarted_sidecar_serves_as_soon_as_its_engine_is_back(
    instance: Instance, killed: str
) -> None:
    engines = await instance.join()
    assert engines[0].answer is not None
    index = ("leader", "other").index(killed)
    sidecar: SidecarProcess = getattr(instance, killed)
    await sidecar.stop(signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await engines[index].closed.wait()
    again = instance.engine(index, incarnation=engines[0].answer.incarnation)

    async def back() -> bool:
        try:
            return "" == (await again.open()).refused
        except (FileNotFoundError, ConnectionRefusedError):
            # Its socket is not there yet.
            return False

    await asyncio.gather(sidecar.start(), until(back))
    assert "no engine came back" not in sidecar.log.read_text()


@pytest.mark.parametrize("dying", ["leader", "other"])
async def test_a_pod_that_dies_whole_ends_the_ranks_of_the_other(
    instance: Instance, dying: str
) -> None:
    """Its sidecar and its engine start anew, and nobody saw the engine die."""
    engines = await instance.join()
    index = ("leader", "other").index(dying)
    sidecar: SidecarProcess = getattr(instance, dying)
    await asyncio.gather(sidecar.stop(signal.SIGKILL), engines[index].die())
    await sidecar.start()
    fresh = instance.engine(index)
    opening = asyncio.create_task(fresh.open())

    async with asyncio.timeout(DEADLINE_SECONDS):
        await engines[1 - index].closed.wait()
    other = instance.engine(1 - index)
    answer = await other.open()
    assert "" == answer.refused
    first = await opening
    if first.incarnation != answer.incarnation:
        # It joined before its own incarnation's end, as a member of a dead one, and is ended too.
        await fresh.closed.wait()
        answer = await instance.engine(index).open()
        assert "" == answer.refused
    await until(instance.ready)


@asynccontextmanager
async def impatient(sidecar: SidecarProcess) -> AsyncIterator[None]:
    """The same sidecar in this process, with clocks that a test can wait for."""
    limits = Limits(ping_seconds=0.1, unknown_after_seconds=0.3, dead_after_seconds=3.0)
    log = structlog.get_logger()
    stop = asyncio.Event()
    run = asyncio.create_task(Sidecar(sidecar.config, RING, log=log, limits=limits).run(stop))

    async def answers() -> bool:
        try:
            return (await sidecar.call("GET", "/health"))[0] == 200
        except aiohttp.ClientError:
            return False

    await until(answers)
    try:
        yield
    finally:
        stop.set()
        await run


@pytest.mark.parametrize("silent", ["leader", "other"])
async def test_who_is_silent_for_too_long_ends_the_ranks_that_hear_nothing(
    tmp_path: Path, silent: str
) -> None:
    instance = Instance(tmp_path, Role.PREFILL)
    index = ("leader", "other").index(silent)
    leaving: SidecarProcess = getattr(instance, silent)
    staying = (instance.other, instance.leader)[index]
    async with running(leaving), impatient(staying):
        engines = await instance.join()
        answer = engines[0].answer
        assert answer is not None
        await until(instance.ready)
        await leaving.stop(signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await engines[1 - index].closed.wait()
        status, raw = await staying.call("GET", "/ready")
        assert 503 == status
        assert b"0 of " in raw
        late = instance.engine(1 - index, incarnation=answer.incarnation)
        assert "start anew" in (await late.open()).refused
        await instance.die()


async def test_a_cancel_and_a_dump_reach_the_ranks_of_both_pods(instance: Instance) -> None:
    engines = await instance.join()
    body = msgspec.json.encode(AbortRequest("pd-1"))
    status, raw = await instance.leader.call("POST", "/pd/v1/abort", body, signed=True)
    assert (200, {"ranks": 2}) == (status, json.loads(raw))
    for engine in engines:
        assert "pd-1" == (await engine.receive(CancelLeg)).rid

    async def describe(engine: FakeEngine) -> None:
        asked = await engine.receive(DumpRequested)
        engine.send(DumpAnswered(asked.request, json.dumps({"is": engine.hello.session}).encode()))

    describing = [asyncio.create_task(describe(engine)) for engine in engines]
    _, raw = await instance.leader.call("GET", "/pd/v1/dump", signed=True)
    await asyncio.gather(*describing)
    ranks = json.loads(raw)["ranks"]
    assert [(0, "engine-0"), (1, "engine-1")] == [
        (rank["node"], rank["engine"]["is"]) for rank in ranks
    ]


async def test_the_other_pod_names_its_leader_to_who_says_hello(instance: Instance) -> None:
    card = InstanceCard(
        cluster="c",
        instance="router-0",
        role="router",
        incarnation="",
        session=instance.other.signer.session,
        http=RankAddress("127.0.0.1", 8000),
    )
    body = msgspec.json.encode(card)
    status, raw = await instance.other.call("POST", "/pd/v1/hello", body, signed=True)
    assert 503 == status
    assert f"its leader is at {instance.leader.http}" in raw.decode()


async def test_reports_are_taken_from_signed_pods_of_this_instance_only(
    instance: Instance,
) -> None:
    leader, session = instance.leader, instance.leader.signer.session
    http = RankAddress("127.0.0.9", 8998)

    async def tell(
        *, node: int = 1, name: str = "c-prefill-0", by: str = session, at: SidecarProcess = leader
    ) -> tuple[int, str]:
        report = PodReport(cluster="c", instance=name, pod=PodCard(node, http, by))
        body = msgspec.msgpack.encode(report)
        status, raw = await at.call("POST", "/pd/v1/pod/report", body, signed=True)
        return status, raw.decode(errors="replace")

    assert (await tell(by="another"))[0] == 401
    assert "pod.node is 0" in (await tell(node=0))[1]
    assert "pod.node is 2" in (await tell(node=2))[1]
    assert "instance is 'x'" in (await tell(name="x"))[1]
    at_other = await tell(at=instance.other, by=instance.other.signer.session)
    assert "only pod 0 leads" in at_other[1]
    for path in ("report", "orders"):
        status, _ = await leader.call("POST", f"/pd/v1/pod/{path}", b"x")
        assert 401 == status
        status, _ = await leader.call("POST", f"/pd/v1/pod/{path}", b"\xc1", signed=True)
        assert 400 == status
    asked = OrdersAsked(instance="c-prefill-0", pod=PodCard(3, http, session))
    raw_asked = msgspec.msgpack.encode(asked)
    assert 409 == (await leader.call("POST", "/pd/v1/pod/orders", raw_asked, signed=True))[0]
