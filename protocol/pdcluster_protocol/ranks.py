"""The ranks of one node: what each holds, and where each can be reached now.

A node is one data-parallel rank. Its tensor, pipeline and context ranks share one page allocation
(the same page numbers in every rank's own arena) and one end, but each has its own arena, control
address and transport session. They are numbered by SGLang's *unique rank*, which is dense inside a
data-parallel rank, so the number in a message and the index in a table are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.topology import Parallelism, RankCoordinate


class Lane(NamedTuple):
    """Which of our ranks deals with which of a peer's."""

    rank: int
    peer: RankAddress


class SlotTable(msgspec.Struct, frozen=True):
    """Where an arena has its metadata: slot by slot, in each the rows of all buffers side by side.

    So one write moves a slot. A peer whose slots do not lie so has a table for each buffer.
    """

    offset: int
    """Of slot 0 in the arena."""
    rows: tuple[int, ...]
    """Bytes of one slot in each buffer, in SGLang's order."""

    @property
    def slot_bytes(self) -> int:
        """Of all rows of a slot: from a slot to the next."""
        return sum(self.rows)

    def row_offset(self, buffer: int, slot: int) -> int:
        """Where a buffer's row of a slot begins."""
        return self.offset + slot * self.slot_bytes + sum(self.rows[:buffer])


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank is and holds; never changes."""

    coordinate: RankCoordinate
    layout: KVLayout
    """Its own regions: its layers, its heads."""
    metadata: SlotTable


class OwnRank:
    """One rank of this node as it can be reached now."""

    __slots__ = (
        "address",
        "base_address",
        "index",
        "mapping",
        "place",
        "session",
    )

    def __init__(self, index: int, place: RankPlace) -> None:
        self.index = index
        self.place = place
        self.address: RankAddress | None = None
        self.session: str | None = None
        self.base_address = 0
        self.mapping = 0
        """How often the transport has mapped our memory; peers tell old addresses by it."""


def rank_coordinates(parallel: Parallelism, dp_rank: int) -> tuple[RankCoordinate, ...]:
    """The ranks of one data-parallel rank, in the order of their unique ranks."""
    return tuple(
        RankCoordinate(dp=dp_rank, cp=cp, tp=tp, pp=pp)
        for tp in range(parallel.attention_tp)
        for pp in range(parallel.pp)
        for cp in range(parallel.cp)
    )
