"""The memory of each rank of an engine: an arena with what it holds, and its metadata rows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.memory.device import DeviceArena, reserve
from pdcluster_engine.memory.metadata import MetadataTable, metadata_bytes
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.rank_layout import RankSlice, kv_facts, rank_slice
from pdcluster_protocol.rank_mapping import RowSpread, require_side
from pdcluster_protocol.ranks import RankPlace, rank_coordinates
from pdcluster_protocol.topology import Parallelism, RankCoordinate


class RankMemory(msgspec.Struct, frozen=True):
    """One rank's arena and what lies in it."""

    coordinate: RankCoordinate
    slice: RankSlice
    arena: Arena | DeviceArena
    metadata: MetadataTable

    @property
    def place(self) -> RankPlace:
        """The same, for the node."""
        return RankPlace(
            coordinate=self.coordinate,
            layout=self.slice.layout,
            metadata=self.metadata.place,
        )


def row_spread(parallel: Parallelism) -> RowSpread:
    """Which context ranks send: each of ours has all rows, so each sends its share of the pages."""
    return RowSpread.FIRST_CP_RANK if parallel.cp == 1 else RowSpread.PAGE_RANGES


def rank_slices(
    config: EngineConfig, layout: KVLayout
) -> tuple[tuple[RankCoordinate, RankSlice], ...]:
    """What each rank of the engine's data-parallel rank holds of the whole model's rows.

    Raises:
        ConfigError: the model's rows cannot be divided so, or the device has room for one rank.
    """
    parallel = config.parallel
    require_side(parallel, kv_facts(layout, spread=row_spread(parallel)), role=config.role)
    if parallel.ranks_per_dp > 1 and config.device != "cpu":
        raise ConfigError(
            f"parallel makes {parallel.ranks_per_dp} ranks of each data-parallel rank, and device"
            f" is {config.device}; engine native emulates them on the CPU only: set tp to dp, and"
            " pp and cp to 1"
        )
    return tuple(
        (coordinate, rank_slice(layout, parallel, coordinate))
        for coordinate in rank_coordinates(parallel, config.dp_rank)
    )


def reserve_ranks(
    device: torch.device,
    slices: Sequence[tuple[RankCoordinate, RankSlice]],
    *,
    pages: int,
    slots: int,
) -> tuple[RankMemory, ...]:
    """An arena of so many pages and metadata slots for each rank.

    Raises:
        ConfigError: there is no page, or not that much memory.
    """
    memories = []
    for coordinate, held in slices:
        arena = reserve(device, held.layout, pages, metadata_bytes=metadata_bytes(slots))
        table = MetadataTable(arena.window, arena.metadata_offset, slots)
        memories.append(RankMemory(coordinate, held, arena, table))
    return tuple(memories)
