"""Two instances of two pods each: messages pass between the pods of ranks, deaths reach all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.messages import (
    Accepted,
    Inbound,
    Outbound,
    PeerChanged,
    PeerState,
    Resolve,
    Resolved,
    TransferMetadata,
)
from support.pods import Instance
from support.sidecars import (
    DEADLINE_SECONDS,
    FakeEngine,
    SidecarProcess,
    running,
    until,
)

KEY = Key(77, 1 << 40)


class Pair(NamedTuple):
    """Two instances of two pods that have met through rank 1 of decode, and their engines."""

    prefill: Instance
    decode: Instance
    prefill_engines: tuple[FakeEngine, FakeEngine]
    decode_engines: tuple[FakeEngine, FakeEngine]


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    prefill, decode = Instance(tmp_path / "p", Role.PREFILL), Instance(tmp_path / "d", Role.DECODE)
    async with running(prefill.leader, prefill.other, decode.leader, decode.other):
        engines = await asyncio.gather(prefill.join(), decode.join())
        await until(prefill.ready)
        made = Pair(prefill, decode, *engines)
        assert (await resolve(made, 1)).card is not None
        yield made
        await prefill.die()
        await decode.die()


async def resolve(pair: Pair, dp: int) -> Resolved:
    pair.decode_engines[dp].send(Resolve(*msgspec.to_builtins(pair.prefill.leader.http)))
    return await pair.decode_engines[dp].receive(Resolved)


def metadata(sender: FakeEngine) -> TransferMetadata:
    return TransferMetadata(KEY, sender.address, "127.0.0.1:15001", b"\5\0\0\0", 3, prompt_tokens=9)


async def exchange(pair: Pair, dp: int) -> None:
    """Decode's rank sends metadata to prefill's of the same number, which accepts it."""
    prefill, decode = pair.prefill_engines[dp], pair.decode_engines[dp]
    decode.send(Outbound(prefill.address, metadata(decode)))
    assert metadata(decode) == (await prefill.receive(Inbound)).message
    prefill.send(Outbound(decode.address, Accepted(KEY, dp)))
    assert Accepted(KEY, dp) == (await decode.receive(Inbound)).message


async def test_messages_of_every_rank_pass_between_its_own_pods_and_a_death_reaches_all(
    pair: Pair,
) -> None:
    for dp in (0, 1):
        assert (await resolve(pair, dp)).card is not None
        await exchange(pair, dp)
        relayed = await pair.prefill.other.metric('pdcluster_messages_total{direction="in"}')
        assert dp == relayed

    answer = pair.prefill_engines[0].answer
    assert answer is not None
    await pair.prefill_engines[1].die()
    for engine in pair.decode_engines:
        async with asyncio.timeout(DEADLINE_SECONDS):
            changed = await engine.receive(PeerChanged)
        assert (answer.incarnation, PeerState.DEAD) == (changed.incarnation, changed.state)


@pytest.mark.parametrize("killed", ["leader", "other"])
async def test_after_a_sidecar_was_restarted_its_ranks_speak_with_their_peers_again(
    pair: Pair, killed: str
) -> None:
    index = ("leader", "other").index(killed)
    old = pair.prefill_engines[index]
    assert old.answer is not None
    sidecar: SidecarProcess = getattr(pair.prefill, killed)
    await sidecar.stop(signal.SIGKILL)
    await old.closed.wait()
    await sidecar.start()
    again = pair.prefill.engine(index, incarnation=old.answer.incarnation)
    assert old.answer.incarnation == (await again.open()).incarnation

    decode = pair.decode_engines[index]

    async def heard() -> bool:
        # Repeated, as the nodes do, until the peers know the new session.
        again.send(Outbound(decode.address, Accepted(KEY, index)))
        decode.send(Outbound(again.address, metadata(decode)))
        return decode.has(Inbound) and again.has(Inbound)

    await until(heard)
