"""Memory of a simulated rank: real bytes at the real addresses of its layout.

Each row of a prompt has bytes of its own, made from its key, region and token, so that a byte of
another request, region, token or head, or of an earlier attempt, is never the right one.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field
from functools import lru_cache

from pdcluster_protocol.ids import Key
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.ledger import NodeSetup
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.rank_layout import rank_slice
from pdcluster_protocol.rank_mapping import RowSpread
from pdcluster_protocol.ranks import RankPlace
from pdcluster_protocol.topology import Parallelism
from support.rank_places import rank_places

LAYOUT = KVLayout(
    page_size=4,
    dtype="float32",
    regions=(
        Region(layer=0, kind="latent", bytes_per_token=8),
        Region(layer=0, kind="indexer", bytes_per_token=2),
        Region(layer=1, kind="latent", bytes_per_token=8),
    ),
)
METADATA_ROWS = (64, 128)
ALONE = Parallelism()


@dataclass(frozen=True)
class Shape:
    """What a pair serves and over how many ranks."""

    layout: KVLayout = LAYOUT
    prefill: Parallelism = ALONE
    decode: Parallelism = ALONE
    spread: RowSpread = RowSpread.FIRST_CP_RANK

    def parallel(self, name: str) -> Parallelism:
        return self.prefill if name == "prefill" else self.decode

    def setup(
        self,
        name: str,
        *,
        pages: int,
        slots: int,
        timeouts: Timeouts,
        limits: Limits,
        scatter_seed: int,
    ) -> NodeSetup:
        parallel = self.parallel(name)
        return NodeSetup(
            layout=self.layout,
            page_count=pages,
            slot_count=slots,
            parallel=parallel,
            ranks=rank_places(
                self.layout,
                parallel,
                dp_rank=0,
                page_count=pages,
                metadata_rows=METADATA_ROWS,
            ),
            spread=self.spread,
            timeouts=timeouts,
            limits=limits,
            scatter_seed=scatter_seed,
        )


@lru_cache(maxsize=4096)
def whole_row(key: Key, region: str, token: int, nbytes: int) -> bytes:
    """The bytes of one token in a region of the whole model."""
    return hashlib.shake_128(f"{key} {region} {token}".encode()).digest(nbytes)


@dataclass
class Memory:
    """One rank's arena."""

    shape: Shape
    parallel: Parallelism
    place: RankPlace
    page_count: int
    slot_count: int
    base: int = 0
    content: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.content = bytearray(self.place.metadata.row_offset(0, self.slot_count))
        self._first_heads = rank_slice(
            self.shape.layout, self.parallel, self.place.coordinate
        ).first_heads

    def expected(self, key: Key, region: int, token: int) -> bytes:
        """What a row of one of our regions must hold."""
        own = self.place.layout.regions[region]
        whole = next(r for r in self.shape.layout.regions if r.name == own.name)
        start = self._first_heads[region] * (own.bytes_per_token // own.heads)
        row = whole_row(key, own.name, token, whole.bytes_per_token)
        return row[start : start + own.bytes_per_token]

    def own_region(self, region: int) -> int | None:
        """Which of our regions is this one of the whole model; None when another rank has it."""
        name = self.shape.layout.regions[region].name
        for index, own in enumerate(self.place.layout.regions):
            if own.name == name:
                return index
        return None

    def row_offset(self, region: int, page: int, row: int) -> int:
        layout = self.place.layout
        start = layout.page_offset(region, page, self.page_count)
        return start + row * layout.regions[region].bytes_per_token

    def compute(self, key: Key, region: int, token: int, page: int) -> None:
        """The model writes a row."""
        row = self.expected(key, region, token)
        at = self.row_offset(region, page, token % self.place.layout.page_size)
        self.content[at : at + len(row)] = row

    def read(self, region: int, token: int, page: int) -> bytes:
        at = self.row_offset(region, page, token % self.place.layout.page_size)
        return bytes(self.content[at : at + self.place.layout.regions[region].bytes_per_token])

    def set_room(self, slot: int, key: Key | None) -> None:
        """Write all rows of a slot, or zero its room."""
        for buffer, row in enumerate(self.place.metadata.rows):
            text = whole_row(key, "metadata", slot, row - 8) if key else bytes(row - 8)
            room = (key.room if key else 0).to_bytes(8, "little")
            start = self.place.metadata.row_offset(buffer, slot)
            self.content[start : start + row] = room + text

    def room(self, slot: int) -> int:
        """What every row of a slot says; 0 when they differ."""
        table = self.place.metadata
        starts = (table.row_offset(buffer, slot) for buffer in range(len(table.rows)))
        rooms = {int.from_bytes(self.content[at : at + 8], "little") for at in starts}
        return rooms.pop() if len(rooms) == 1 else 0

    def pieces(self, offset: int, nbytes: int, count: int, stride: int) -> bytes:
        parts = (offset + i * stride for i in range(count))
        return b"".join(bytes(self.content[at : at + nbytes]) for at in parts)

    def digest(self, offset: int, nbytes: int, count: int, stride: int) -> int:
        return zlib.crc32(self.pieces(offset, nbytes, count, stride))

    def holds(self, offset: int, nbytes: int) -> bool:
        return 0 <= offset and offset + nbytes <= len(self.content)

    def touched(self, offset: int, nbytes: int) -> tuple[bool, set[int]]:
        """(whether it is metadata, the slots or pages) that a range touches."""
        slots = self.place.metadata
        if offset >= slots.offset:
            first, last = (offset - slots.offset, offset + nbytes - 1 - slots.offset)
            return True, set(range(first // slots.slot_bytes, last // slots.slot_bytes + 1))
        layout = self.place.layout
        for region in reversed(range(len(layout.regions))):
            start = layout.region_offset(region, self.page_count)
            if offset >= start:
                item = layout.item_bytes(region)
                first, last = (offset - start) // item, (offset + nbytes - 1 - start) // item
                return False, set(range(first, last + 1))
        raise AssertionError(offset)
