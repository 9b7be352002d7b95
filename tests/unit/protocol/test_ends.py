"""A room that ended badly remembers its first cause, also when it drained before it closed."""

from __future__ import annotations

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.messages import InstanceCard
from pdcluster_protocol.push.aborts import Aborts
from pdcluster_protocol.push.decode_ends import DecodeEnds
from pdcluster_protocol.push.decode_room import DecodeRoom, PrefillRank
from pdcluster_protocol.push.farewells import Farewells
from pdcluster_protocol.push.prefill_ends import PrefillEnds
from pdcluster_protocol.push.prefill_room import PrefillRoom
from pdcluster_protocol.push.receiver import ReceiverState
from pdcluster_protocol.push.sender import SenderState
from pdcluster_protocol.rank_mapping import Purpose
from support.ledgers import HERE, LANE, OTHER_LANE, OTHER_PEER, PEER, joined_ledger, key, sent

LEG = LegArrived(key(), "rid", 10, "digest", 4, PEER)


def buried_reason(ledger: Ledger) -> str:
    tombstone = ledger.tombstone(key())
    assert tombstone is not None
    return tombstone.reason


def test_prefill_buries_the_first_cause_after_the_model_has_let_go() -> None:
    ledger = joined_ledger()
    room = PrefillRoom(LEG, 0.2)
    room.state, room.computing = SenderState.COMPUTING, True
    ends = PrefillEnds(ledger, {1: room}, Farewells(ledger))
    ends.fail(room, Reason.STALLED, "no byte")
    ends.fail(room, Reason.ABORTED, "later")
    assert ledger.tombstone(key()) is None
    room.computing = False
    ends.close_if_drained(room)

    assert Reason.STALLED == buried_reason(ledger)


def test_prefill_buries_the_cause_of_a_failure_before_anything_was_started() -> None:
    ledger = joined_ledger()
    room = PrefillRoom(LEG, 0.2)
    PrefillEnds(ledger, {1: room}, Farewells(ledger)).fail(room, Reason.BOOTSTRAP_TIMEOUT, "")

    assert Reason.BOOTSTRAP_TIMEOUT == buried_reason(ledger)


def test_decode_buries_the_first_cause_after_proof_and_asks_ranks_by_their_number() -> None:
    ledger = joined_ledger()
    room = DecodeRoom(LEG)
    room.state = ReceiverState.TRANSFERRING
    room.prefill_ranks = (
        (PrefillRank(PEER, 2, Purpose.REAL), PrefillRank(OTHER_PEER, 1, Purpose.DUMMY)),
    )
    room.card = InstanceCard("c", "p", "prefill", "i", "s", HERE)
    aborts = Aborts(ledger)
    ends = DecodeEnds(ledger, {1: room}, aborts)
    ends.fail(room, Reason.CHECKSUM_MISMATCH, "region 0")
    ends.fail(room, Reason.STALLED, "later")
    asked = [to for to, _ in sent(ledger.take_effects())]
    assert {(0, 2): LANE, (0, 1): OTHER_LANE} == aborts._pending[key()].waiting
    ends.proven(room)

    assert [PEER, OTHER_PEER] == asked
    assert Reason.CHECKSUM_MISMATCH == buried_reason(ledger)
    assert 0 == len(aborts)
