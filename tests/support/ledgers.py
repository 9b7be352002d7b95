"""A small ledger and what tests of the machines over it need."""

from __future__ import annotations

from typing import Any

from pdcluster_protocol.effects import Effect, Send
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.ledger import Ledger, NodeSetup
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.messages import NodeMessage
from pdcluster_protocol.topology import Parallelism, RankCoordinate

LAYOUT = KVLayout(
    4, "float32", (Region(0, "latent", 6), Region(0, "rope", 2), Region(1, "indexer", 3))
)
BUFFERS = ((20000, 16), (21000, 8))
"""(offset, bytes of one row) of two metadata buffers."""
HERE = RankAddress("127.64.0.1", 9000)
PEER = RankAddress("127.64.0.2", 9000)
OTHER_PEER = RankAddress("127.64.0.3", 9000)


def key(room: int = 1, milliseconds: int = 1000) -> Key:
    return Key(room, milliseconds << 22)


def node_setup(**changes: Any) -> NodeSetup:
    fields: dict[str, Any] = {
        "layout": LAYOUT,
        "page_count": 16,
        "metadata_offset": 20000,
        "metadata_buffers": BUFFERS,
        "slot_count": 4,
        "parallel": Parallelism(),
        "coordinate": RankCoordinate(),
        "timeouts": Timeouts(),
        "limits": Limits(),
    }
    return NodeSetup(**(fields | changes))


def joined_ledger(**changes: Any) -> Ledger:
    """A ledger whose rank has an address and a transport session."""
    ledger = Ledger(node_setup(**changes))
    ledger.address, ledger.session = HERE, "127.64.0.1:15000"
    return ledger


def sent(effects: list[Effect]) -> list[tuple[RankAddress, NodeMessage]]:
    """The messages among some effects, in order."""
    return [(effect.to, effect.message) for effect in effects if isinstance(effect, Send)]
