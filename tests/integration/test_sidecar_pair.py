"""Two real sidecars with engines that only speak the link: what passes, ends, or is dropped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio
import zmq

from pdcluster_protocol.authentication import FrameSigner, KeyRing
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress, Role
from pdcluster_protocol.messages import (
    Abort,
    Accepted,
    Bootstrap,
    Inbound,
    NodeMessage,
    Outbound,
    PeerChanged,
    PeerState,
    Resolve,
    Resolved,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.push import frames
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.sidecars import LAYOUT, RING, FakeEngine, SidecarProcess, running

KEY = Key(77, 1 << 40)


class Pair(NamedTuple):
    """A prefill and a decode instance that have met."""

    prefill: SidecarProcess
    decode: SidecarProcess
    prefill_engine: FakeEngine
    decode_engine: FakeEngine


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    prefill = SidecarProcess(tmp_path / "p", Role.PREFILL)
    decode = SidecarProcess(tmp_path / "d", Role.DECODE)
    engines = (FakeEngine(prefill.config), FakeEngine(decode.config))
    async with running(prefill, decode):
        for engine in engines:
            assert "" == (await engine.open()).refused
        made = Pair(prefill, decode, *engines)
        resolved = await resolve(made)
        assert resolved.card is not None, resolved.detail
        yield made
        for engine in engines:
            await engine.die()


async def resolve(pair: Pair) -> Resolved:
    pair.decode_engine.send(Resolve(*msgspec.to_builtins(pair.prefill.http)))
    return await pair.decode_engine.receive(Resolved)


def metadata(pair: Pair) -> TransferMetadata:
    return TransferMetadata(
        KEY, pair.decode_engine.address, "127.0.0.1:15001", b"\5\0\0\0", 3, prompt_tokens=9
    )


async def test_a_resolved_card_names_the_prefill_instance(pair: Pair) -> None:
    resolved = await resolve(pair)

    assert resolved.card is not None
    assert resolved.trusted
    assert ("c-prefill-0", LAYOUT) == (resolved.card.instance, resolved.card.layout)
    assert pair.prefill_engine.address == resolved.card.ranks[0].address


async def test_messages_arrive_on_both_sides_with_the_senders_incarnation(pair: Pair) -> None:
    to_prefill: list[NodeMessage] = [metadata(pair), Abort(KEY, pair.decode_engine.address, 1)]
    to_decode: list[NodeMessage] = [Accepted(KEY, 0), Status(KEY, 4, 0, runs=3, reason="x")]
    for message in to_prefill:
        pair.decode_engine.send(Outbound(pair.prefill_engine.address, message))
    for message in to_decode:
        pair.prefill_engine.send(Outbound(pair.decode_engine.address, message))

    assert pair.decode_engine.answer is not None
    assert pair.prefill_engine.answer is not None
    for message in to_prefill:
        expected = Inbound(message, pair.decode_engine.answer.incarnation)
        assert expected == await pair.prefill_engine.receive(Inbound)
    for message in to_decode:
        expected = Inbound(message, pair.prefill_engine.answer.incarnation)
        assert expected == await pair.decode_engine.receive(Inbound)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_the_death_of_an_engine_reaches_the_other_at_once(pair: Pair, victim: str) -> None:
    dying, living = pair.prefill_engine, pair.decode_engine
    if victim == "decode":
        dying, living = living, dying
    assert dying.answer is not None
    loop = asyncio.get_running_loop()
    start = loop.time()
    await dying.die()
    changed = await living.receive(PeerChanged)

    assert loop.time() - start < 0.2
    assert (dying.answer.incarnation, PeerState.DEAD) == (changed.incarnation, changed.state)
    assert f"c-{victim}-0" in changed.detail


async def test_a_restarted_engine_is_a_new_incarnation_and_is_met_anew(pair: Pair) -> None:
    old = pair.prefill_engine.answer
    assert old is not None
    await pair.prefill_engine.die()
    await pair.decode_engine.receive(PeerChanged)
    refused = await resolve(pair)
    assert Reason.NOT_READY == refused.reason

    late = FakeEngine(pair.prefill.config, incarnation=old.incarnation)
    assert f"incarnation {old.incarnation} has ended; start anew" == (await late.open()).refused
    await late.die()
    engine = FakeEngine(pair.prefill.config)
    answer = await engine.open()
    assert answer.incarnation not in {"", old.incarnation}
    resolved = await resolve(pair)
    assert resolved.card is not None
    assert answer.incarnation == resolved.card.incarnation
    pair.decode_engine.send(Outbound(engine.address, metadata(pair)))
    await engine.receive(Inbound)
    await engine.die()


async def test_a_restarted_sidecar_keeps_the_incarnation_of_its_ranks(pair: Pair) -> None:
    old = pair.prefill_engine.answer
    assert old is not None
    await pair.prefill.stop(signal.SIGKILL)
    await pair.prefill_engine.closed.wait()
    await pair.prefill.start()
    engine = FakeEngine(pair.prefill.config, incarnation=old.incarnation, rooms=(KEY,))

    assert old.incarnation == (await engine.open()).incarnation
    # Decode's sidecar says hello by itself, after which both know the new session.
    await pair.prefill.wait_metric('pdcluster_peers{state="alive"}', 1.0)
    engine.send(Outbound(pair.decode_engine.address, Accepted(KEY, 0)))
    pair.decode_engine.send(Outbound(engine.address, metadata(pair)))
    assert Accepted(KEY, 0) == (await pair.decode_engine.receive(Inbound)).message
    await engine.receive(Inbound)
    dead = [
        changed
        for changed in pair.decode_engine._inbox
        if isinstance(changed, PeerChanged) and changed.state is PeerState.DEAD
    ]
    assert [] == dead
    await engine.die()


async def test_a_hanging_engine_becomes_unknown_and_gets_nothing_new(pair: Pair) -> None:
    pair.prefill_engine.hang()
    changed = await pair.decode_engine.receive(PeerChanged)

    assert PeerState.UNKNOWN is changed.state
    assert "loop stands still" in changed.detail
    assert Reason.NOT_READY == (await resolve(pair)).reason
    assert 503 == (await pair.prefill.call("GET", "/ready"))[0]


def push(to: RankAddress, parts: list[bytes]) -> None:
    context = zmq.Context()
    sock = context.socket(zmq.PUSH)
    sock.connect(f"tcp://{to}")
    sock.send_multipart(parts)
    # Lingers until the message has left.
    context.destroy(linger=5000)


async def test_what_is_forged_replayed_or_malformed_is_counted_and_dropped(pair: Pair) -> None:
    to = pair.prefill_engine.address
    message = Bootstrap(KEY, pair.decode_engine.address)
    wrong = FrameSigner(KeyRing({"k1": b"x" * 32}), "attacker")
    forged = frames.seal(message, signer=wrong, receiver="s", incarnation="i")
    member = FrameSigner(RING, "member")
    stranger = frames.seal(message, signer=member, receiver="s", incarnation="i")
    cases = (
        ("unauthorized", forged),
        ("unauthorized", stranger),
        ("unsigned", frames.encode(message)),
        ("malformed", [b"ABORT", b"nonsense"]),
        ("malformed", [b"\x80\x04]\x94."] * 80),
    )
    expected: dict[str, float] = {}
    for reason, parts in cases:
        await asyncio.to_thread(push, to, parts)
        expected[reason] = expected.get(reason, 0) + 1
        name = f'pdcluster_messages_dropped_total{{reason="{reason}"}}'
        await pair.prefill.wait_metric(name, expected[reason])

    assert not pair.prefill_engine.has(Inbound)
    pair.decode_engine.send(Outbound(to, message))
    assert message == (await pair.prefill_engine.receive(Inbound)).message


async def test_a_return_address_that_is_not_the_senders_is_dropped(pair: Pair) -> None:
    elsewhere = Bootstrap(KEY, RankAddress("127.0.0.1", 1))
    pair.decode_engine.send(Outbound(pair.prefill_engine.address, elsewhere))

    await pair.prefill.wait_metric(
        'pdcluster_messages_dropped_total{reason="foreign_address"}', 1.0
    )


async def test_nothing_is_sent_to_an_address_that_no_peer_has(pair: Pair) -> None:
    pair.decode_engine.send(Outbound(RankAddress("127.0.0.1", 1), Accepted(KEY, 0)))

    await pair.decode.wait_metric('pdcluster_messages_dropped_total{reason="unknown_peer"}', 1.0)


async def test_resolving_nobody_says_that_nobody_answers(pair: Pair) -> None:
    pair.decode_engine.send(Resolve(pair.decode.config.host, 1))
    resolved = await pair.decode_engine.receive(Resolved)

    assert (Reason.PEER_UNREACHABLE, None) == (resolved.reason, resolved.card)


async def test_a_peer_of_another_fingerprint_is_refused_with_both_values(
    pair: Pair, tmp_path: Path
) -> None:
    other = SidecarProcess(tmp_path / "o", Role.PREFILL, fingerprint="g", instance="c-prefill-1")
    async with running(other):
        engine = FakeEngine(other.config)
        await engine.open()
        pair.decode_engine.send(Resolve(*msgspec.to_builtins(other.http)))
        resolved = await pair.decode_engine.receive(Resolved)
        await engine.die()

    assert Reason.FINGERPRINT_MISMATCH == resolved.reason
    assert "ours is 'f'" in resolved.detail
    assert "'g'" in resolved.detail


async def test_a_peer_of_another_page_size_is_refused_with_both_values(
    pair: Pair, tmp_path: Path
) -> None:
    other = SidecarProcess(tmp_path / "o", Role.PREFILL, instance="c-prefill-1")
    async with running(other):
        engine = FakeEngine(other.config, layout=msgspec.structs.replace(LAYOUT, page_size=32))
        await engine.open()
        pair.decode_engine.send(Resolve(*msgspec.to_builtins(other.http)))
        resolved = await pair.decode_engine.receive(Resolved)
        await engine.die()

    assert Reason.LAYOUT_MISMATCH == resolved.reason
    assert "page_size: ours is 64, the peer's is 32" in resolved.detail


async def test_a_peer_with_another_key_is_refused(pair: Pair, tmp_path: Path) -> None:
    other = SidecarProcess(
        tmp_path / "o", Role.PREFILL, key=b"another key of 32 bytes.........", instance="x"
    )
    async with running(other):
        engine = FakeEngine(other.config)
        await engine.open()
        pair.decode_engine.send(Resolve(*msgspec.to_builtins(other.http)))
        resolved = await pair.decode_engine.receive(Resolved)
        await engine.die()

    assert Reason.UNAUTHORIZED == resolved.reason


async def test_two_ranks_have_a_port_each_and_die_together(tmp_path: Path) -> None:
    prefill = SidecarProcess(tmp_path / "p", Role.PREFILL, parallel=Parallelism(tp=2, dp=2))
    async with running(prefill):
        first = FakeEngine(prefill.config, coordinate=RankCoordinate(dp=0))
        second = FakeEngine(prefill.config, coordinate=RankCoordinate(dp=1))
        answers = [await first.open(), await second.open()]
        doubled = FakeEngine(prefill.config, coordinate=RankCoordinate(dp=1))

        assert [9000, 9001] == [answer.address.port for answer in answers]
        assert answers[0].incarnation == answers[1].incarnation
        assert "linked already" in (await doubled.open()).refused
        await first.die()
        await asyncio.wait_for(second.closed.wait(), 5)
        for engine in (second, doubled):
            await engine.die()
