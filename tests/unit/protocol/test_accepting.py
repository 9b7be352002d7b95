"""How prefill answers metadata: by what follows from it, or in time before its repeat."""

from __future__ import annotations

import pytest

from pdcluster_protocol import invariants
from pdcluster_protocol.effects import Effect, Write
from pdcluster_protocol.events import (
    Event,
    Joined,
    LegArrived,
    MessageArrived,
    OperationDone,
    RowsWritten,
    Tick,
    TransportReady,
)
from pdcluster_protocol.messages import (
    Accepted,
    NodeMessage,
    RegisterKVArgs,
    RunsLanded,
    TransferMetadata,
)
from pdcluster_protocol.nodes import Node, prefill_node
from pdcluster_protocol.push.destinations import register_kv_args
from pdcluster_protocol.push.pairing import page_bytes
from support.ledgers import HERE, LAYOUT, PEER, SLOTS, key, node_setup, sent

METADATA = TransferMetadata(
    key(), PEER, "s", page_bytes((5, 3, 9)), 1, prompt_tokens=10, prompt_digest="digest", epoch=7
)
REGISTRATION = register_kv_args(
    LAYOUT,
    base_address=0,
    page_count=16,
    slot_count=4,
    metadata=SLOTS,
    template=RegisterKVArgs(PEER, "s", (), (), ()),
)


def tell(node: Node, event: Event, now: float = 1.0) -> list[Effect]:
    effects = node.handle(event, now)
    invariants.check(node)
    return effects


def hear(node: Node, message: NodeMessage) -> list[Effect]:
    return tell(node, MessageArrived(message, "i"))


def accepted(effects: list[Effect]) -> list[NodeMessage]:
    return [message for _, message in sent(effects) if isinstance(message, Accepted)]


@pytest.fixture
def node() -> Node:
    """It has a leg, and knows where decode's memory lies."""
    node = prefill_node(node_setup())
    tell(node, Joined("ours", HERE))
    tell(node, TransportReady("ours:1", 0))
    hear(node, REGISTRATION)
    tell(node, LegArrived(key(), "rid", 10, "digest", 4, PEER))
    return node


def test_metadata_is_answered_before_its_repeat_when_nothing_follows_from_it(node: Node) -> None:
    assert [] == accepted(hear(node, METADATA))
    due = node.deadline()
    assert due is not None
    assert 1.0 < due < 1.0 + node.ledger.setup.limits.retransmit_seconds_min

    assert [Accepted(key(), 0)] == accepted(tell(node, Tick(), due))
    # A repeat says that the answer was lost.
    assert [Accepted(key(), 0)] == accepted(hear(node, METADATA))


def test_runs_answer_metadata_too(node: Node) -> None:
    hear(node, METADATA)
    due = node.deadline()
    assert due is not None
    (write,) = [e for e in tell(node, RowsWritten(key(), 0, 0, 4)) if isinstance(e, Write)]
    landed = tell(node, OperationDone(write.operation, ok=True, digest=5))

    assert [RunsLanded] == [type(message) for _, message in sent(landed)]
    assert [] == accepted(tell(node, Tick(), due))
