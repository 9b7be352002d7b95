"""Messages that come late or in another order, at a whole node: nothing old undoes what is new."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdcluster_protocol import invariants
from pdcluster_protocol.effects import ConcludeLeg, Count, Effect, Fence, VerifyRun, Write
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import (
    ComputeStopped,
    Drained,
    Event,
    Joined,
    LegArrived,
    LegCancelled,
    MessageArrived,
    OperationDone,
    PeerResolved,
    RowsWritten,
    Tick,
    TransportLost,
    TransportReady,
)
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.ledger import NodeSetup
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import (
    Abort,
    AbortAck,
    Concluded,
    InstanceCard,
    KVPoll,
    NodeMessage,
    RankCard,
    RegisterKVArgs,
    Run,
    RunsLanded,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.nodes import Node, decode_node, prefill_node
from pdcluster_protocol.push.destinations import register_kv_args
from pdcluster_protocol.push.pairing import page_bytes
from pdcluster_protocol.ranks import RankPlace
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.ledgers import HERE, LAYOUT, OTHER_PEER, PEER, SLOTS, key, node_setup, sent
from support.rank_places import rank_places

LEG = LegArrived(key(), "rid", 10, "digest", 4, PEER)
METADATA = TransferMetadata(
    key(), PEER, "s", page_bytes((5, 3, 9)), 1, prompt_tokens=10, prompt_digest="digest", epoch=7
)


def tell(node: Node, event: Event) -> list[Effect]:
    effects = node.handle(event, 1.0)
    invariants.check(node)
    return effects


def hear(node: Node, message: NodeMessage, incarnation: str = "i") -> list[Effect]:
    return tell(node, MessageArrived(message, incarnation))


def joined(node: Node) -> Node:
    tell(node, Joined("ours", HERE))
    tell(node, TransportReady("ours:1", 0))
    return node


def registration(mapping: int, *, pages: int = 16) -> RegisterKVArgs:
    return register_kv_args(
        LAYOUT,
        base_address=mapping << 32,
        page_count=pages,
        slot_count=4,
        metadata=SLOTS,
        template=RegisterKVArgs(PEER, "s", (), (), (), mapping=mapping),
    )


def metadata(mapping: int) -> TransferMetadata:
    return msgspec.structs.replace(METADATA, mapping=mapping)


def mappings_written(effects: list[Effect]) -> set[int]:
    return {e.destination_address >> 32 for e in effects if isinstance(e, Write)}


def acks(effects: list[Effect]) -> list[NodeMessage]:
    return [message for _, message in sent(effects) if isinstance(message, AbortAck)]


def computing_prefill(mapping: int) -> Node:
    """A prefill node that has a leg and page numbers and whose first page is final."""
    node = joined(prefill_node(node_setup()))
    hear(node, registration(mapping))
    tell(node, LEG)
    hear(node, metadata(mapping))
    return node


def test_runs_in_a_status_of_another_reservation_are_not_looked_at() -> None:
    node = joined(decode_node(node_setup()))
    tell(node, LEG)
    tell(node, PeerResolved(PEER, _card()))
    (page, *_) = node.ledger.pool.pages_of(key())
    landed = (Run(0, 0, page, 1, 24, digest=5),)
    stale = hear(node, Status(key(), KVPoll.SUCCESS, 0, runs=1, landed=landed, epoch=9), "p")
    right = hear(node, Status(key(), KVPoll.SUCCESS, 0, runs=1, landed=landed, epoch=1), "p")

    assert [Count("runs_stale")] == stale
    assert [VerifyRun] == [type(effect) for effect in right]


def test_page_numbers_of_an_earlier_mapping_do_not_turn_writes_back() -> None:
    node = computing_prefill(2)
    first = tell(node, RowsWritten(key(), 0, 0, 4))
    late = [*hear(node, registration(1)), *hear(node, metadata(1))]

    assert {2} == mappings_written(first)
    assert set() == mappings_written(late)
    assert {2} == mappings_written(tell(node, RowsWritten(key(), 0, 4, 8)))


def test_no_proof_is_given_while_a_write_to_the_present_mapping_is_under_way() -> None:
    node = computing_prefill(2)
    (write,) = [e for e in tell(node, RowsWritten(key(), 0, 0, 4)) if isinstance(e, Write)]
    hear(node, registration(1))
    hear(node, metadata(1))
    tell(node, LegCancelled(key(), Reason.CLIENT_GONE))
    early = [*hear(node, Abort(key(), PEER, 1)), *tell(node, ComputeStopped(key()))]
    ended = tell(node, OperationDone(write.operation, ok=True))

    assert [] == acks(early)
    assert [AbortAck(key(), 0, 1, drained=True)] == acks(ended)


def test_a_later_mapping_is_written_to_at_once() -> None:
    node = computing_prefill(1)
    tell(node, RowsWritten(key(), 0, 0, 4))
    moved = [*hear(node, registration(2)), *hear(node, metadata(2))]

    assert {2} == mappings_written(moved)


def test_a_restarted_decode_under_its_old_name_is_not_measured_by_its_old_memory() -> None:
    node = joined(prefill_node(node_setup()))
    hear(node, registration(1, pages=4), "before")
    tell(node, LEG)
    hear(node, metadata(1), "after")
    assert [LEG.key] == [view.key for view in node.views()]
    hear(node, registration(1, pages=16), "after")
    hear(node, metadata(1), "after")

    assert ["Computing"] == [view.state for view in node.views()]


def test_page_numbers_of_an_aborted_key_are_never_written_to() -> None:
    node = joined(prefill_node(node_setup()))
    hear(node, registration(1))
    tell(node, msgspec.structs.replace(LEG, key=Key(1, 0), attempt_known=False))
    acked = hear(node, Abort(key(), PEER, 3))
    late = hear(node, metadata(1))

    assert [AbortAck(key(), 0, 3)] == [message for _, message in sent(acked)]
    assert [(KVPoll.FAILED, Reason.ABORTED)] == [
        (m.status, m.reason) for _, m in sent(late) if isinstance(m, Status)
    ]
    assert ["Bootstrapping"] == [view.state for view in node.views()]


def test_a_cancel_that_overtakes_its_leg_is_found_by_it() -> None:
    for make in (prefill_node, decode_node):
        node = joined(make(node_setup()))
        assert [] == tell(node, LegCancelled(key(), Reason.CLIENT_GONE))
        (end,) = tell(node, LEG)

        assert isinstance(end, ConcludeLeg)
        assert (key(), Reason.ABORTED) == (end.key, end.reason)
        invariants.check_idle(node)


@pytest.mark.parametrize("make", [prefill_node, decode_node])
def test_a_foreign_room_that_comes_again_is_told_to_take_another(
    make: Callable[[NodeSetup], Node],
) -> None:
    node = joined(make(node_setup()))
    leg = msgspec.structs.replace(LEG, key=Key(5, 0), attempt_known=False)
    tell(node, leg)
    tell(node, LegCancelled(leg.key, Reason.CLIENT_GONE))

    refused = ConcludeLeg(
        leg.key, Reason.ROOM_IN_USE, "room 5 was used here not long ago; take another room"
    )
    assert [refused] == tell(node, leg)


def test_a_cancel_of_a_running_or_concluded_key_leaves_no_second_mark() -> None:
    node = joined(prefill_node(node_setup()))
    tell(node, LEG)
    tell(node, LegCancelled(key(), Reason.CLIENT_GONE))
    before = node.ledger.tombstone(key())
    tell(node, LegCancelled(key(), Reason.ABORTED))

    assert before is node.ledger.tombstone(key())


def test_decode_hears_why_prefill_refused_the_leg_that_it_waits_for() -> None:
    for before in (True, False):
        node = joined(prefill_node(node_setup()))
        hear(node, registration(1))
        if before:
            hear(node, metadata(1))
        tell(node, Drained())
        tell(node, LEG)
        statuses = [m for _, m in sent(hear(node, metadata(1))) if isinstance(m, Status)]

        assert [(KVPoll.FAILED, Reason.SHUTTING_DOWN)] == [(m.status, m.reason) for m in statuses]


def test_a_doubled_leg_ends_itself_and_not_the_room_that_lives() -> None:
    node = computing_prefill(1)
    (end,) = tell(node, LEG)

    assert isinstance(end, ConcludeLeg)
    assert Reason.ROOM_IN_USE == end.reason
    assert ["Computing"] == [view.state for view in node.views()]
    assert node.ledger.tombstone(key()) is None


def test_prefill_hears_the_first_cause_of_a_room_that_still_drains() -> None:
    node = decode_that_found_wrong_bytes()
    answered = hear(node, Status(key(), KVPoll.SUCCESS, 0, runs=1, reply_to=PEER), "p")

    assert [Concluded(key(), KVPoll.FAILED, Reason.CHECKSUM_MISMATCH)] == [
        message for _, message in sent(answered)
    ]


def test_pages_with_wrong_bytes_come_back_by_a_fence_and_not_by_their_writers_word() -> None:
    node = decode_that_found_wrong_bytes()
    answered = hear(node, AbortAck(key(), 0, 1, drained=True), "p")

    assert [Fence] == [type(effect) for effect in answered]
    assert node.ledger.pool.awaits_fence(key())
    tell(node, TransportLost("fenced"))
    assert not node.ledger.pool.holds(key())
    assert [] == node.views()


def decode_that_found_wrong_bytes() -> Node:
    node = joined(decode_node(node_setup()))
    tell(node, LEG)
    tell(node, PeerResolved(PEER, _card()))
    (page, *_) = node.ledger.pool.pages_of(key())
    (verify,) = [
        effect
        for effect in hear(node, RunsLanded(key(), 0, 1, (Run(0, 0, page, 1, 24, digest=5),)), "p")
        if isinstance(effect, VerifyRun)
    ]
    tell(node, OperationDone(verify.operation, ok=True, digest=6))
    return node


def _card() -> InstanceCard:
    return InstanceCard(
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


def test_a_request_that_ends_badly_writes_nothing_again() -> None:
    node = computing_prefill(1)
    writes = [e for e in tell(node, RowsWritten(key(), 0, 0, 8)) if isinstance(e, Write)]
    hear(node, Abort(key(), PEER, 1))
    tell(node, OperationDone(writes[0].operation, ok=False, detail="refused"))

    # The model has not let go yet, so the room drains; the clock of rewrites must not run.
    later = node.handle(Tick(), 1.0 + 2 * node.ledger.setup.limits.rewrite_seconds)

    assert ["Draining"] == [view.state for view in node.views()]
    assert [] == [effect for effect in later if isinstance(effect, Write)]


def test_a_moved_destination_does_not_stop_the_rewrites_of_another() -> None:
    parallel = Parallelism(tp=2)
    places = rank_places(LAYOUT, parallel, dp_rank=0, page_count=16, metadata_rows=(16, 8))
    node = joined(prefill_node(node_setup()))
    lanes = (PEER, OTHER_PEER)
    for rank, peer in enumerate(lanes):
        hear(node, registration_of(places[rank], peer, mapping=1))
    tell(node, LEG)
    for peer in lanes:
        hear(node, msgspec.structs.replace(metadata(1), reply_to=peer, session=str(peer)))
    writes = [e for e in tell(node, RowsWritten(key(), 0, 0, 4)) if isinstance(e, Write)]
    (failed,) = [write for write in writes if write.target == str(PEER)]
    tell(node, OperationDone(failed.operation, ok=False, detail="refused"))
    hear(node, registration_of(places[1], OTHER_PEER, mapping=2))
    hear(node, msgspec.structs.replace(metadata(2), reply_to=OTHER_PEER, session=str(OTHER_PEER)))

    later = node.handle(Tick(), 1.0 + 2 * node.ledger.setup.limits.rewrite_seconds)

    again = [effect for effect in later if isinstance(effect, Write)]
    assert [failed.destination_address] == [write.destination_address for write in again]


def registration_of(place: RankPlace, peer: RankAddress, *, mapping: int) -> RegisterKVArgs:
    """The registration of one of two tensor-parallel decode ranks."""
    template = RegisterKVArgs(
        peer,
        str(peer),
        (),
        (),
        (),
        decode_tp_rank=place.coordinate.tp,
        decode_tp_size=2,
        mapping=mapping,
    )
    return register_kv_args(
        place.layout,
        base_address=(mapping << 32) + (place.coordinate.tp << 40),
        page_count=16,
        slot_count=4,
        metadata=place.metadata,
        template=template,
    )


def test_two_replicas_that_claim_one_room_are_told_so_and_get_nothing() -> None:
    places = rank_places(LAYOUT, Parallelism(tp=2), dp_rank=0, page_count=16, metadata_rows=(16, 8))
    node = joined(prefill_node(node_setup()))
    tell(node, LEG)
    effects: list[Effect] = []
    for peer in (PEER, OTHER_PEER):
        hear(node, registration_of(places[0], peer, mapping=1))
        numbers = msgspec.structs.replace(metadata(1), reply_to=peer, session=str(peer))
        effects += hear(node, numbers)

    ends = [effect for effect in effects if isinstance(effect, ConcludeLeg)]
    assert [Reason.RANK_CONFLICT] == [end.reason for end in ends]
    assert [] == node.views()
    late = msgspec.structs.replace(metadata(1), reply_to=OTHER_PEER, session=str(OTHER_PEER))
    assert [(OTHER_PEER, Reason.RANK_CONFLICT)] == [
        (to, message.reason)
        for to, message in sent(hear(node, late))
        if isinstance(message, Status)
    ]


def test_prefill_replaces_its_transport_once_it_knows_some_sessions_that_are_gone() -> None:
    node = joined(prefill_node(node_setup(limits=Limits(gone_sessions_idle_max=1))))
    for number in (1, 2):
        room, session = key(number), f"s-{number}"
        hear(node, msgspec.structs.replace(registration(number), session=session))
        tell(node, msgspec.structs.replace(LEG, key=room))
        hear(node, msgspec.structs.replace(metadata(number), key=room, session=session))
        (write,) = (e for e in tell(node, RowsWritten(room, 0, 0, 4)) if isinstance(e, Write))
        tell(node, ComputeStopped(room, Reason.MODEL_FAILED, "as asked"))
        tell(node, OperationDone(write.operation, ok=True))
        assert session == write.target
        assert () == tuple(node.views())

    effects = hear(node, registration(3))
    assert [Fence(cause="connections to more than 1 sessions that are gone", pages=0)] == effects
    tell(node, TransportLost("fenced"))
    assert [] == tell(node, TransportReady("ours:2", 0))
