"""What a drain is at a node and at an instance: nothing new, and whatever was taken goes on."""

from __future__ import annotations

import pytest

from pdcluster_protocol import invariants
from pdcluster_protocol.effects import ConcludeLeg, Effect, StartPrefill
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import (
    Drained,
    Event,
    Joined,
    LegArrived,
    MessageArrived,
    TransportReady,
)
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import (
    KVPoll,
    Load,
    NodeMessage,
    Pulse,
    RegisterKVArgs,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.nodes import Node, prefill_node
from pdcluster_protocol.push.destinations import register_kv_args
from pdcluster_protocol.push.pairing import page_bytes
from pdcluster_protocol.topology import RankCoordinate
from support.instances import hello, instance
from support.ledgers import HERE, LAYOUT, OTHER_PEER, PEER, SLOTS, key, node_setup, sent

REFUSED = [(KVPoll.FAILED, Reason.SHUTTING_DOWN)]


@pytest.fixture
def node() -> Node:
    node = prefill_node(node_setup())
    tell(node, Joined("ours", HERE))
    tell(node, TransportReady("ours:1", 0))
    for peer in (PEER, OTHER_PEER):
        hear(node, _registration(peer))
    return node


def tell(node: Node, event: Event) -> list[Effect]:
    effects = node.handle(event, 1.0)
    invariants.check(node)
    return effects


def hear(node: Node, message: NodeMessage) -> list[Effect]:
    return tell(node, MessageArrived(message, "i"))


def _registration(peer: RankAddress) -> RegisterKVArgs:
    return register_kv_args(
        LAYOUT,
        base_address=1 << 32,
        page_count=16,
        slot_count=4,
        metadata=SLOTS,
        template=RegisterKVArgs(peer, "s", (), (), (), mapping=1),
    )


def leg(room: int) -> LegArrived:
    return LegArrived(key(room), f"rid-{room}", 10, "digest", 4, PEER)


def metadata(room: int, peer: RankAddress = PEER) -> TransferMetadata:
    pages = page_bytes((5, 3, 9))
    return TransferMetadata(
        key(room), peer, "s", pages, 1, prompt_tokens=10, prompt_digest="digest", mapping=1
    )


def statuses(effects: list[Effect]) -> list[tuple[int, str]]:
    return [(m.status, m.reason) for _, m in sent(effects) if isinstance(m, Status)]


def test_a_room_whose_leg_was_taken_before_is_computed(node: Node) -> None:
    tell(node, leg(1))
    drained = tell(node, Drained())
    effects = hear(node, metadata(1))

    assert [] == drained
    assert [key(1)] == [effect.key for effect in effects if isinstance(effect, StartPrefill)]


def test_decode_that_waits_for_a_leg_which_cannot_come_hears_it_at_once(node: Node) -> None:
    hear(node, metadata(1))
    hear(node, metadata(2, OTHER_PEER))
    effects = tell(node, Drained())

    assert REFUSED * 2 == statuses(effects)
    assert [PEER, OTHER_PEER] == [to for to, _ in sent(effects)]
    assert 2 == node.side.waiting_count()


def test_page_numbers_of_an_unknown_room_are_answered_and_not_kept(node: Node) -> None:
    tell(node, Drained())

    assert REFUSED == statuses(hear(node, metadata(1)))
    [end] = tell(node, leg(1))
    assert isinstance(end, ConcludeLeg)
    assert Reason.SHUTTING_DOWN is end.reason


# --- the instance -------------------------------------------------------------------------------


def pulse(*, draining: bool, rooms: int = 0, loops: int = 1) -> Pulse:
    return Pulse(loops, Load(rooms_open=rooms), rooms=rooms, draining=draining)


def test_one_rank_that_drains_drains_the_instance_which_can_still_be_relied_on() -> None:
    made = instance()
    for dp in (0, 1):
        made.join(hello(dp), minted="i", now=0.0)
    made.pulse(RankCoordinate(dp=1), pulse(draining=True), 0.0)

    assert ("this instance is draining", "") == (made.unready(0.0), made.trouble(0.0))
    report, card = made.load_report(0.0), made.card(0.0)
    assert (True, True) == (report.ready, report.draining) == (card.ready, card.draining)
    late = made.load_report(3.0)
    assert (False, True) == (late.ready, late.draining)


def test_it_is_drained_once_every_rank_has_heard_of_it_and_has_no_room() -> None:
    made = instance()
    steps = []
    for dp, said in (
        (0, pulse(draining=True)),
        (1, pulse(draining=False)),
        (1, pulse(draining=True, rooms=1)),
        (1, pulse(draining=True)),
    ):
        if RankCoordinate(dp=dp) not in made.members:
            made.join(hello(dp), minted="i", now=0.0)
        made.pulse(RankCoordinate(dp=dp), said, 0.0)
        steps.append(made.drained)

    assert [False, False, False, True] == steps


def test_what_a_pod_passes_on_says_that_its_rank_drains() -> None:
    made = instance()
    made.join(hello(0), minted="i", now=0.0)
    said = pulse(draining=True, rooms=2, loops=7)
    made.pulse(RankCoordinate(), said, 0.0)

    assert ((RankCoordinate(), said),) == made.pulses()


def test_a_drain_ends_with_its_incarnation() -> None:
    made = instance()
    made.join(hello(0), minted="i", now=0.0)
    made.pulse(RankCoordinate(), pulse(draining=True), 0.0)
    made.end()
    made.join(hello(0), minted="i-2", now=0.0)

    assert not made.draining
