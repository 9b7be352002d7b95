"""A node that checks itself answers like a bare one, and raises at the event that broke it."""

from __future__ import annotations

import pytest

from pdcluster_engine.checking import CheckedNode
from pdcluster_protocol.errors import InvariantViolated
from pdcluster_protocol.events import LegArrived, Tick, TransportReady
from pdcluster_protocol.nodes import decode_node
from support.ledgers import key, node_setup

LEG = LegArrived(
    key=key(1),
    rid="r",
    prompt_tokens=5,
    prompt_digest="d" * 16,
    output_tokens_max=2,
    bootstrap=None,
    prefill_dp_rank=0,
    budget_seconds=1.0,
    attempt_known=False,
)


def test_a_checked_node_answers_like_a_bare_one() -> None:
    bare, checked = decode_node(node_setup()), CheckedNode(decode_node(node_setup()))
    for event in (TransportReady("127.64.0.1:15000", 0), LEG, Tick()):
        assert bare.handle(event, 1.0) == checked.handle(event, 1.0)

    assert bare.load() == checked.load()
    assert bare.deadline() == checked.deadline()
    assert bare.open_keys() == checked.open_keys()
    assert {**bare.dump(), "invariants": "checked"} == checked.dump()
    assert "0-1" == checked.dump()["rooms"][0]["pages"]  # type: ignore[index]  # as JSON: untyped


def test_a_page_without_a_room_is_raised_at_the_next_event() -> None:
    bare = decode_node(node_setup())
    checked = CheckedNode(bare)
    checked.handle(Tick(), 1.0)
    bare.ledger.pool.reserve(key(7), 1)

    with pytest.raises(InvariantViolated, match="pages without a room"):
        checked.handle(Tick(), 2.0)


def test_a_slot_that_outlives_its_request_is_raised_at_idle() -> None:
    bare = decode_node(node_setup())
    checked = CheckedNode(bare)
    bare.ledger.slots.reserve(key(7), 1)

    with pytest.raises(InvariantViolated, match=r"idle node still has .*'slots': 1"):
        checked.handle(Tick(), 1.0)
