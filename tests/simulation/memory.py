"""Memory and wires of a simulated pair: what lies in which page, who writes to it, and who may."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from pdcluster_protocol.ids import Key
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.ledger import NodeSetup
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.topology import Parallelism, RankCoordinate

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


@dataclass(frozen=True)
class Cell:
    """The content of one page of one region, or of one metadata row."""

    key: Key
    region: int
    position: int
    rows: int
    flipped: bool = False


@dataclass
class Memory:
    """One rank's arena as cells; addresses are the real ones of the layout."""

    page_count: int
    slot_count: int
    base: int = 0
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)

    @property
    def metadata_offset(self) -> int:
        return LAYOUT.arena_bytes(self.page_count)

    @property
    def metadata_buffers(self) -> tuple[tuple[int, int], ...]:
        offset, buffers = self.metadata_offset, []
        for row in METADATA_ROWS:
            buffers.append((offset, row))
            offset += row * self.slot_count
        return tuple(buffers)

    def locate(self, offset: int) -> tuple[int, int]:
        """(region, page) of an offset; metadata buffers count on after the regions."""
        for index, (start, row) in reversed(list(enumerate(self.metadata_buffers))):
            if offset >= start:
                return len(LAYOUT.regions) + index, (offset - start) // row
        for region in reversed(range(len(LAYOUT.regions))):
            start = LAYOUT.region_offset(region, self.page_count)
            if offset >= start:
                return region, (offset - start) // LAYOUT.item_bytes(region)
        raise AssertionError(offset)

    def span(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The cells that `nbytes` from `offset` touch."""
        region, page = self.locate(offset)
        if region >= len(LAYOUT.regions):
            return [(region, page)]
        return [(region, page + i) for i in range(-(-nbytes // LAYOUT.item_bytes(region)))]

    def digest(self, offset: int, nbytes: int) -> int:
        content = [self.cells.get(place) for place in self.span(offset, nbytes)]
        return zlib.crc32(repr(content).encode())

    def setup(self, *, timeouts: Timeouts, limits: Limits, scatter_seed: int) -> NodeSetup:
        return NodeSetup(
            layout=LAYOUT,
            page_count=self.page_count,
            metadata_offset=self.metadata_offset,
            metadata_buffers=self.metadata_buffers,
            slot_count=self.slot_count,
            parallel=Parallelism(),
            coordinate=RankCoordinate(),
            timeouts=timeouts,
            limits=limits,
            scatter_seed=scatter_seed,
        )
