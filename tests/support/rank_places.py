"""What each rank of a node holds, where no engine reserves the memory."""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.rank_layout import rank_slice
from pdcluster_protocol.ranks import RankPlace, SlotTable, rank_coordinates
from pdcluster_protocol.topology import Parallelism


def rank_places(
    layout: KVLayout,
    parallel: Parallelism,
    *,
    dp_rank: int,
    page_count: int,
    metadata_rows: Sequence[int],
) -> tuple[RankPlace, ...]:
    """What each rank of one data-parallel rank holds.

    `layout` is the whole model's. An arena has its KV regions first, then its metadata slots.
    """
    places = []
    for coordinate in rank_coordinates(parallel, dp_rank):
        own = rank_slice(layout, parallel, coordinate).layout
        slots = SlotTable(own.arena_bytes(page_count), tuple(metadata_rows))
        places.append(RankPlace(coordinate=coordinate, layout=own, metadata=slots))
    return tuple(places)
