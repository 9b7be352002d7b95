"""A small ledger and what tests of the machines over it need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdcluster_protocol.effects import Effect, Send
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.ledger import Ledger, NodeSetup
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.messages import NodeMessage, RegisterKVArgs
from pdcluster_protocol.push.destinations import Destination
from pdcluster_protocol.push.routes import Part, Route, Routes
from pdcluster_protocol.push.runs import RunPlanner
from pdcluster_protocol.ranks import Lane, RankPlace, SlotTable
from pdcluster_protocol.segments import PagePair, RowSlice
from pdcluster_protocol.topology import Parallelism, RankCoordinate

LAYOUT = KVLayout(
    4, "float32", (Region(0, "latent", 6), Region(0, "rope", 2), Region(1, "indexer", 3))
)
SLOTS = SlotTable(20000, (16, 8))
"""Metadata slots of two rows."""
HERE = RankAddress("127.64.0.1", 9000)
PEER = RankAddress("127.64.0.2", 9000)
OTHER_PEER = RankAddress("127.64.0.3", 9000)
LANE = Lane(0, PEER)
OTHER_LANE = Lane(0, OTHER_PEER)


def key(room: int = 1, milliseconds: int = 1000) -> Key:
    return Key(room, milliseconds << 22)


def node_setup(**changes: Any) -> NodeSetup:
    fields: dict[str, Any] = {
        "layout": LAYOUT,
        "page_count": 16,
        "slot_count": 4,
        "parallel": Parallelism(),
        "ranks": (RankPlace(coordinate=RankCoordinate(), layout=LAYOUT, metadata=SLOTS),),
        "timeouts": Timeouts(),
        "limits": Limits(),
    }
    return NodeSetup(**(fields | changes))


def joined_ledger(**changes: Any) -> Ledger:
    """A ledger whose rank has an address and a transport session."""
    ledger = Ledger(node_setup(**changes))
    for rank in ledger.ranks:
        rank.address, rank.session = HERE, "127.64.0.1:15000"
    return ledger


def whole_parts(layout: KVLayout) -> tuple[Part, ...]:
    """What a rank sends that has everything, to one that needs everything."""
    return tuple(
        Part(
            index,
            RowSlice(index, 0, region.bytes_per_token, index, 0, *[region.bytes_per_token] * 2),
        )
        for index, region in enumerate(layout.regions)
    )


def whole_planner(
    layout: KVLayout,
    *,
    prompt_tokens: int,
    sources: Sequence[int],
    targets: Sequence[int],
    bytes_max: int,
) -> RunPlanner:
    """A planner between two replicas of one rank each."""
    pairs = enumerate(zip(sources, targets, strict=False))
    pages = [PagePair(position, source, target) for position, (source, target) in pairs]
    return RunPlanner(
        whole_parts(layout),
        pages,
        prompt_tokens=prompt_tokens,
        page_size=layout.page_size,
        bytes_max=bytes_max,
    )


def one_rank_route() -> Route:
    """From the only rank of a prefill replica to the only one of a decode replica."""
    routes = Routes(node_setup())
    mapping, coordinate = routes.of(RegisterKVArgs(PEER, "s", (), (), ()))
    return routes.route(mapping, 0, coordinate)


def destination(
    session: str = "s",
    incarnation: str = "i",
    *,
    region_bases: tuple[int, ...] = (0, 0, 0),
    buffer_bases: tuple[int, ...] = (0, 0),
    page_count: int = 16,
    slot_count: int = 4,
    slot_bytes: int = 0,
) -> Destination:
    """The memory of the only rank of a decode replica."""
    return Destination(
        session,
        incarnation,
        region_bases,
        buffer_bases,
        page_count,
        slot_count,
        slot_bytes,
        one_rank_route().mapping,
        RankCoordinate(),
        LAYOUT,
    )


def sent(effects: list[Effect]) -> list[tuple[RankAddress, NodeMessage]]:
    """The messages among some effects, in order."""
    return [(effect.to, effect.message) for effect in effects if isinstance(effect, Send)]
