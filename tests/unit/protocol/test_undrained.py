"""Decode reads nothing while a write may still land in its pages, however well all was verified."""

from __future__ import annotations

import pytest

from pdcluster_protocol import invariants
from pdcluster_protocol.effects import Effect, Fence, ReadMetadata, VerifyRun
from pdcluster_protocol.events import (
    Event,
    Joined,
    LegArrived,
    MessageArrived,
    OperationDone,
    PeerResolved,
    TransportLost,
    TransportReady,
)
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import (
    InstanceCard,
    KVPoll,
    RankCard,
    Run,
    RunsLanded,
    Status,
)
from pdcluster_protocol.nodes import Node, decode_node
from pdcluster_protocol.topology import RankCoordinate
from support.ledgers import HERE, LAYOUT, PEER, SLOTS, key, node_setup

TOKENS = 10
CARD = InstanceCard(
    cluster="c",
    instance="p-0",
    role="prefill",
    incarnation="p",
    session="s",
    http=PEER,
    ranks=(RankCard(RankCoordinate(), PEER, 30000),),
    layout=LAYOUT,
    ready=True,
)


def tell(node: Node, event: Event) -> list[Effect]:
    effects = node.handle(event, 1.0)
    invariants.check(node)
    return effects


@pytest.fixture
def node() -> Node:
    """A decode node whose only room waits for what prefill announces."""
    made = decode_node(node_setup())
    tell(made, Joined("ours", HERE))
    tell(made, TransportReady("ours:1", 0))
    tell(made, LegArrived(key(), "rid", TOKENS, "digest", 4, PEER))
    tell(made, PeerResolved(RankAddress(PEER.host, PEER.port), CARD))
    return made


def announced(node: Node) -> tuple[Run, ...]:
    pages = node.ledger.pool.pages_of(key())[: LAYOUT.pages_for(TOKENS)]
    (slot,) = node.ledger.slots.pages_of(key())
    runs: list[Run] = []
    for region, described in enumerate(LAYOUT.regions):
        for position, page in enumerate(pages):
            rows = min(TOKENS - position * LAYOUT.page_size, LAYOUT.page_size)
            nbytes = rows * described.bytes_per_token
            runs.append(Run(len(runs), region, page, 1, nbytes, digest=5))
    runs.append(Run(len(runs), len(LAYOUT.regions), slot, 1, sum(SLOTS.rows), digest=5))
    return tuple(runs)


def status(node: Node, *, drained: bool) -> MessageArrived:
    runs = len(announced(node))
    return MessageArrived(Status(key(), KVPoll.SUCCESS, 0, runs=runs, drained=drained), "p")


def verify(node: Node, effects: list[Effect]) -> list[Effect]:
    """What follows when all runs have the right bytes."""
    asked = [effect for effect in effects if isinstance(effect, VerifyRun)]
    assert len(announced(node)) == len(asked)
    return [
        effect
        for each in asked
        for effect in tell(node, OperationDone(each.operation, ok=True, digest=5))
    ]


def landed(node: Node, *, drained: bool) -> list[Effect]:
    """All runs are announced and verified, and prefill says its last word."""
    epoch = node.side.views()[0].epoch  # type: ignore[attr-defined]  # A decode room has one.
    runs = RunsLanded(key(), 0, epoch, announced(node))
    assert [] == verify(node, tell(node, MessageArrived(runs, "p")))
    return tell(node, status(node, drained=drained))


def reads(effects: list[Effect]) -> int:
    return sum(isinstance(effect, ReadMetadata) for effect in effects)


def test_without_a_doubt_it_reads_at_once(node: Node) -> None:
    assert 1 == reads(landed(node, drained=True))


def test_a_write_that_may_still_land_is_fenced_off_and_all_is_verified_again(node: Node) -> None:
    effects = landed(node, drained=False)
    assert 0 == reads(effects)
    assert [Fence("a write may still land where all is verified", 4)] == effects
    # What prefill repeats meanwhile changes nothing.
    assert [] == tell(node, status(node, drained=False))
    tell(node, TransportLost("fenced"))
    again = tell(node, TransportReady("ours:2", 0))
    assert 0 == reads(again)

    assert 1 == reads(verify(node, again))


def test_what_landed_before_the_fence_is_found_by_the_second_look(node: Node) -> None:
    landed(node, drained=False)
    tell(node, TransportLost("fenced"))
    asked = [e for e in tell(node, TransportReady("ours:2", 0)) if isinstance(e, VerifyRun)]
    tell(node, OperationDone(asked[0].operation, ok=True, digest=6))

    assert ["Draining"] == [view.state for view in node.views()]
