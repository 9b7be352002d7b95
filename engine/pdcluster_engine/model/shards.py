"""One region's rows over the arenas of all ranks that hold a part of it.

Tensor, pipeline and context ranks are emulated: one model and one page allocation, and the same
page numbers in each rank's own arena. A new row is cut by heads and stored with every rank that
holds any of them; a row that attention sees is put together again from what lies in the arenas, so
that decode computes with nothing but the bytes which reached each of its ranks.

Several ranks may hold the same heads (latent rows, context ranks, more tensor ranks than heads).
They are then read in turn, row by row: a copy that nobody reads could hold anything. With one rank
there is one tensor, stored and read without any further copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec
import torch

from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.memory.device import DeviceArena
from pdcluster_engine.model.port import RankArena
from pdcluster_protocol.layout import KVLayout, Region


class Shard(msgspec.Struct, frozen=True):
    """The part of a region's rows that one rank holds."""

    rows: torch.Tensor
    """`[pages × page_size, heads, width]` in the rank's arena."""
    first_head: int

    @property
    def end_head(self) -> int:
        """The first head behind its own."""
        return self.first_head + int(self.rows.shape[1])


class RegionRows:
    """All rows of one region; a place is `page × page_size + row`, the same in every arena."""

    __slots__ = ("_holders", "_only", "_shards", "device")

    def __init__(self, shards: Sequence[Shard], *, heads: int, name: str) -> None:
        """Group the shards by the heads that they hold.

        Raises:
            ValueError: a head that no shard or more than one group holds: a fault of the caller.
        """
        self._shards = tuple(shards)
        groups: dict[tuple[int, int], list[torch.Tensor]] = {}
        for shard in sorted(shards, key=lambda shard: shard.first_head):
            groups.setdefault((shard.first_head, shard.end_head), []).append(shard.rows)
        ends = [0, *(end for _, end in groups)]
        if [start for start, _ in groups] != ends[:-1] or ends[-1] != heads:
            held = ", ".join(f"[{start}, {end})" for start, end in groups) or "none"
            message = f"region {name} has heads [0, {heads}); the ranks hold {held}"
            raise ValueError(message)
        self._holders = tuple(groups.values())
        self._only = self._shards[0].rows if len(self._shards) == 1 else None
        self.device = self._shards[0].rows.device

    def store(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows `[N, heads, width]` at `places` `[N]`, with every rank that holds a part."""
        if self._only is not None:
            self._only.index_copy_(0, places, rows)
            return
        for shard in self._shards:
            part = rows[:, shard.first_head : shard.end_head]
            shard.rows.index_copy_(0, places, part)

    def gather(self, places: torch.Tensor) -> torch.Tensor:
        """The rows at `places`, `[N, heads, width]`."""
        if self._only is not None:
            return self._only.index_select(0, places)
        parts = [_in_turn(holders, places) for holders in self._holders]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def region_rows(
    layout: KVLayout,
    placements: Sequence[RankArena],
    page_count: int,
    *,
    widths: Sequence[int],
    dtype: torch.dtype,
) -> list[RegionRows]:
    """The rows of each region of the whole model's `layout`; `widths` are elements a head.

    The tensors must be made outside inference mode, since those made inside would refuse to be
    written outside it.

    Raises:
        ValueError: the placements together do not hold the whole model.
    """
    found: dict[tuple[int, str], list[Shard]] = {}
    for placement in placements:
        memory = _bytes_of(placement.arena)
        own = placement.slice.layout
        for index, region in enumerate(own.regions):
            begin = own.region_offset(index, page_count)
            stored = memory[begin : begin + page_count * own.item_bytes(index)].view(dtype)
            rows = stored.view(page_count * own.page_size, region.heads, -1)
            shard = Shard(rows, placement.slice.first_heads[index])
            found.setdefault(_place(region), []).append(shard)
    together = []
    for region, width in zip(layout.regions, widths, strict=True):
        shards = found.get(_place(region), [])
        for shard in shards:
            if shard.rows.shape[2] != width:
                message = (
                    f"region {region.name} has rows of {width} elements a head; a rank's slice"
                    f" has {shard.rows.shape[2]}"
                )
                raise ValueError(message)
        together.append(RegionRows(shards, heads=region.heads, name=region.name))
    return together


def _in_turn(holders: Sequence[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
    """The rows at `places`, of which each holder gives every n-th."""
    rows = holders[0].index_select(0, places)
    for turn, other in enumerate(holders[1:], start=1):
        mine = places % len(holders) == turn
        rows[mine] = other.index_select(0, places[mine])
    return rows


def _place(region: Region) -> tuple[int, str]:
    return region.layer, region.kind


def _bytes_of(arena: Arena | DeviceArena) -> torch.Tensor:
    """The whole arena as one tensor of bytes."""
    match arena:
        case Arena():
            return torch.frombuffer(arena.view, dtype=torch.uint8)
        case DeviceArena():
            return arena.tensor
        case _:
            assert_never(arena)
