"""Legs and metadata find each other, and what does not fit is refused before a byte is written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_protocol.effects import Count
from pdcluster_protocol.errors import LayoutMismatch, Reason
from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import RegisterKVArgs, TransferMetadata
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.destinations import Destination, register_kv_args
from pdcluster_protocol.push.pairing import Arrived, Pairing, Refusal, page_bytes, page_numbers
from pdcluster_protocol.ranks import Lane
from support.ledgers import (
    LAYOUT,
    OTHER_PEER,
    PEER,
    SLOTS,
    destination,
    joined_ledger,
    key,
)

LEG = LegArrived(key(), "rid", 10, "digest", 4, PEER)
METADATA = TransferMetadata(
    key(), PEER, "s", page_bytes((5, 3, 9)), 1, prompt_tokens=10, prompt_digest="digest", epoch=7
)
DESTINATION = destination()


def registration(session: str = "s", **changes: Any) -> RegisterKVArgs:
    args = register_kv_args(
        LAYOUT,
        base_address=4096,
        page_count=16,
        slot_count=4,
        metadata=SLOTS,
        template=RegisterKVArgs(PEER, session, (), (), ()),
    )
    return msgspec.structs.replace(args, **changes)


def metadata(**changes: Any) -> TransferMetadata:
    return msgspec.structs.replace(METADATA, **changes)


def arrived(incarnation: str = "i", **changes: Any) -> Arrived:
    message = metadata(**changes)
    return Arrived(Lane(0, message.reply_to), message, incarnation)


def matched(
    target: Destination | LayoutMismatch = DESTINATION, **changes: Any
) -> Delivery | Refusal | None:
    return Pairing(joined_ledger()).match(LEG, arrived(**changes), target)


@pytest.fixture
def ledger() -> Ledger:
    return joined_ledger(limits=Limits(peers_max=2, waiting_rooms_max=2))


@pytest.fixture
def pairing(ledger: Ledger) -> Pairing:
    return Pairing(ledger)


def test_metadata_finds_exactly_the_registration_that_it_was_sent_with(pairing: Pairing) -> None:
    pairing.register(registration(page_count=16), "i-1")
    pairing.register(registration(page_count=9), "i-2")

    found = [pairing.destination(METADATA, name) for name in ("i-1", "i-2")]
    assert [16, 9] == [known.page_count for known in found if isinstance(known, Destination)]
    assert pairing.destination(METADATA, "i-3") is None
    assert pairing.destination(metadata(session="t"), "i-1") is None
    assert pairing.destination(metadata(mapping=1), "i-1") is None
    assert pairing.destination(metadata(reply_to=OTHER_PEER), "i-1") is None


def test_a_registration_that_was_overtaken_by_a_later_one_is_stale(
    ledger: Ledger, pairing: Pairing
) -> None:
    pairing.register(registration("new", mapping=2), "i")
    pairing.register(registration("old", mapping=1), "i")

    assert [Count("registration_stale")] == ledger.take_effects()
    assert pairing.destination(metadata(session="old", mapping=1), "i") is None
    known = pairing.destination(metadata(session="new", mapping=2), "i")
    assert isinstance(known, Destination)
    assert 2 == known.mapping


def test_a_registration_of_another_layout_is_remembered_as_that(pairing: Pairing) -> None:
    pairing.register(registration(layout_digest="0" * 16), "i")

    assert isinstance(pairing.destination(METADATA, "i"), LayoutMismatch)


def test_registrations_are_bounded_and_the_oldest_goes_first(pairing: Pairing) -> None:
    for incarnation in ("a", "b", "a", "c"):
        pairing.register(registration(), incarnation)

    known = [pairing.destination(METADATA, incarnation) is not None for incarnation in "abc"]
    assert [False, True, True] == known


def test_sessions_that_no_registration_names_any_more_are_gone(
    ledger: Ledger, pairing: Pairing
) -> None:
    gone = []
    for session in ("a", "b", "c", "d"):
        ledger.contacts.wrote(0, session)
    for session, incarnation in (("a", "1"), ("b", "1"), ("b", "1"), ("c", "2"), ("d", "3")):
        pairing.register(registration(session), incarnation)
        gone.append(ledger.contacts.gone)
    pairing.forget_incarnation("3")
    gone.append(ledger.contacts.gone)

    assert [3, 3, 3, 2, 2, 3] == gone


def test_early_metadata_waits_for_its_leg_once(ledger: Ledger, pairing: Pairing) -> None:
    assert pairing.wait(arrived())
    assert pairing.wait(arrived(epoch=8))

    assert 1 == pairing.early_count
    assert [arrived(epoch=8)] == pairing.take(key(), attempt_known=True)
    assert [] == pairing.take(key(), attempt_known=True)
    assert ledger.deadlines.next() is None


def test_each_decode_rank_has_its_own_metadata(pairing: Pairing) -> None:
    pairing.wait(arrived("i"))
    pairing.wait(arrived("i", reply_to=OTHER_PEER))

    taken = pairing.take(key(), attempt_known=True)
    assert [PEER, OTHER_PEER] == [found.lane.peer for found in taken]


def test_a_leg_takes_only_its_own_attempt_unless_it_knows_none(pairing: Pairing) -> None:
    pairing.wait(arrived("i", key=Key(1, 5)))
    pairing.wait(arrived("i", key=Key(2, 5)))

    assert [] == pairing.take(Key(1, 6), attempt_known=True)
    taken = pairing.take(Key(1, 6), attempt_known=False)
    assert [Key(1, 5)] == [found.metadata.key for found in taken]
    assert 1 == pairing.early_count


def test_metadata_that_waits_has_a_deadline_of_its_own(ledger: Ledger, pairing: Pairing) -> None:
    pairing.wait(arrived("i"))
    ledger.now = 299.0
    pairing.wait(arrived("i"))

    # Repeating it must not keep it alive for ever.
    assert [(Clock.EARLY, key())] == ledger.deadlines.due(300.0)
    assert pairing.forget(key())
    assert not pairing.forget(key())


def test_what_waits_is_bounded_in_rooms_and_in_peers_a_room(
    ledger: Ledger, pairing: Pairing
) -> None:
    ports = [msgspec.structs.replace(PEER, port=9000 + i) for i in range(3)]
    assert [True, True, False] == [pairing.wait(arrived("i", reply_to=p)) for p in ports]
    assert pairing.wait(arrived("i", key=key(2)))
    assert not pairing.wait(arrived("i", key=key(3)))

    assert 2 == pairing.early_count
    assert 2 == len(ledger.take_effects())
    assert 2 == len(ledger.deadlines)


def test_a_dead_instance_takes_its_registrations_and_metadata_along(
    ledger: Ledger, pairing: Pairing
) -> None:
    pairing.register(registration(), "dead")
    pairing.register(registration(layout_digest="0" * 16, reply_to=OTHER_PEER), "dead")
    pairing.register(registration(), "alive")
    pairing.wait(arrived("dead", key=key(1)))
    pairing.wait(arrived("alive", key=key(2)))
    pairing.forget_incarnation("dead")

    assert pairing.destination(METADATA, "dead") is None
    assert pairing.destination(metadata(reply_to=OTHER_PEER), "dead") is None
    assert pairing.destination(METADATA, "alive") is not None
    assert 1 == pairing.early_count
    assert [(Clock.EARLY, key(2))] == ledger.deadlines.due(300.0)


def test_a_match_goes_to_exactly_the_pages_that_decode_reserved() -> None:
    delivery = matched()

    assert isinstance(delivery, Delivery)
    assert ((5, 3, 9), 1, 7, PEER, "i") == (
        delivery.pages,
        delivery.slot,
        delivery.epoch,
        delivery.lane.peer,
        delivery.incarnation,
    )


def test_a_plain_peer_sends_no_digest_and_no_sizes() -> None:
    plain = destination(incarnation="", page_count=0, slot_count=0)

    assert isinstance(matched(plain, prompt_tokens=0, prompt_digest=""), Delivery)


@pytest.mark.parametrize(
    ("changes", "reason", "what"),
    [
        ({"prompt_digest": "other"}, Reason.TOKEN_MISMATCH, "10 tokens with digest digest"),
        ({"prompt_tokens": 9}, Reason.TOKEN_MISMATCH, "decode 9 with digest"),
        ({"pages": b""}, Reason.WIRE_ERROR, "not 3 different pages"),
        ({"pages": b"\0" * 11}, Reason.WIRE_ERROR, "not 3 different pages"),
        ({"pages": page_bytes((5, 3))}, Reason.WIRE_ERROR, "not 3 different pages"),
        ({"pages": page_bytes((5, 3, 9, 1))}, Reason.WIRE_ERROR, "not 3 different pages"),
        ({"pages": page_bytes((5, 3, 5))}, Reason.WIRE_ERROR, "not 3 different pages"),
        ({"pages": page_bytes((5, 3, 16))}, Reason.WIRE_ERROR, "outside decode's registered"),
        ({"pages": page_bytes((5, 3, -1))}, Reason.WIRE_ERROR, "outside decode's registered"),
        ({"aux_index": None}, Reason.WIRE_ERROR, "outside decode's registered"),
        ({"aux_index": -2}, Reason.WIRE_ERROR, "outside decode's registered"),
        ({"aux_index": 4}, Reason.WIRE_ERROR, "outside decode's registered"),
    ],
    ids=str,
)
def test_what_does_not_belong_together_is_refused(
    changes: dict[str, Any], reason: Reason, what: str
) -> None:
    refusal = matched(**changes)

    assert isinstance(refusal, Refusal)
    assert reason is refusal.reason
    assert what in refusal.detail


def test_a_layout_that_differs_is_the_first_thing_to_be_refused() -> None:
    refusal = matched(LayoutMismatch("page_size: ours is 4"), prompt_digest="other")

    assert Refusal(Reason.LAYOUT_MISMATCH, "page_size: ours is 4") == refusal


def test_no_pages_for_no_tokens_is_a_refusal_and_no_crash() -> None:
    leg = msgspec.structs.replace(LEG, prompt_tokens=0)
    empty = arrived(pages=b"", prompt_tokens=0)

    assert isinstance(Pairing(joined_ledger()).match(leg, empty, DESTINATION), Refusal)


def test_page_numbers_are_int32_little_endian_as_in_sglangs_frame() -> None:
    assert bytes.fromhex("01000000 00010000 ffffffff") == page_bytes((1, 256, -1))
    assert (1, 256, -1) == page_numbers(metadata(pages=page_bytes((1, 256, -1))))
