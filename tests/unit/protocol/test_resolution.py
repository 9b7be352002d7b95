"""Who serves a bootstrap address: asked once a second at most, and never of the dead."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_protocol.effects import ConcludeLeg, Effect, ResolvePeer, Send
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import (
    Joined,
    LegArrived,
    PeerResolved,
    PeerStateChanged,
    TransportReady,
)
from pdcluster_protocol.messages import InstanceCard, PeerState, RankCard
from pdcluster_protocol.nodes import Node, decode_node
from pdcluster_protocol.topology import RankCoordinate
from support.ledgers import HERE, LAYOUT, OTHER_PEER, PEER, key, node_setup

CARD = InstanceCard(
    cluster="c",
    instance="p",
    role="prefill",
    incarnation="p-1",
    session="s",
    http=PEER,
    ranks=(RankCard(RankCoordinate(), OTHER_PEER, 30000),),
    layout=LAYOUT,
)


@pytest.fixture
def node() -> Node:
    node = decode_node(node_setup())
    node.handle(Joined("d-1", HERE), 0.0)
    node.handle(TransportReady("d-1:1", 0), 0.0)
    node.handle(leg(1), 0.0)
    node.handle(PeerResolved(PEER, CARD), 0.0)
    return node


def leg(room: int) -> LegArrived:
    return LegArrived(key(room), f"rid-{room}", 3, "digest", 1, PEER)


def asks(effects: list[Effect]) -> bool:
    assert any(isinstance(effect, ResolvePeer | Send) for effect in effects)
    return any(isinstance(effect, ResolvePeer) for effect in effects)


def test_the_answer_serves_the_rooms_of_the_next_second(node: Node) -> None:
    assert not asks(node.handle(leg(2), 0.9))
    assert asks(node.handle(leg(3), 1.0))


def test_an_instance_that_died_is_asked_for_again(node: Node) -> None:
    node.handle(PeerStateChanged("p-1", PeerState.DEAD), 0.1)

    assert asks(node.handle(leg(2), 0.2))


def test_a_refusal_is_not_remembered(node: Node) -> None:
    node.handle(leg(2), 1.5)
    node.handle(PeerResolved(PEER, None, Reason.PEER_UNREACHABLE, "away"), 1.6)

    assert asks(node.handle(leg(3), 1.7))


def test_a_prefill_that_announces_no_runs_is_refused_before_it_gets_an_address(node: Node) -> None:
    plain = msgspec.structs.replace(CARD, wire_min=0, wire_max=0)
    node.handle(PeerStateChanged("p-1", PeerState.DEAD), 0.1)
    node.handle(leg(2), 0.2)
    effects = node.handle(PeerResolved(PEER, plain), 0.3)

    (end,) = [effect for effect in effects if isinstance(effect, ConcludeLeg)]
    assert Reason.WIRE_ERROR == end.reason
    assert "plain SGLang" in end.detail
    assert [] == [effect for effect in effects if isinstance(effect, Send)]
