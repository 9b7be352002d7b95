"""What the bytes of a KV cache mean: regions, pages, addresses, and whether two sides agree.

One arena per rank holds one *region* per (layer, kind); a region is an array of pages, a page is
`page_size` rows, one row a token, as in SGLang's pools. Page i of region r lies at
`region_offset(r) + i * item_bytes(r)`. Only this module computes addresses, so that slabs and rank
slices fit later.

Facts: `DeepSeek-V3` and `glm_moe_dsa` store the compressed latent and the rope key, and on *full*
layers of the latter the indexer's keys (transformers 5.24, observed by a one-token probe).
"""

from __future__ import annotations

import hashlib

import msgspec

from pdcluster_protocol.errors import LayoutMismatch

REGION_ALIGNMENT_BYTES = 4096


class Region(msgspec.Struct, frozen=True):
    """One (layer, kind) of the cache."""

    layer: int
    kind: str
    """`key`, `value` (per head), `latent`, `rope` (MLA) or `indexer`."""
    bytes_per_token: int
    heads: int = 1

    @property
    def name(self) -> str:
        """For messages and errors, for instance `3.latent`."""
        return f"{self.layer}.{self.kind}"


class KVLayout(msgspec.Struct, frozen=True):
    """The regions of one rank in wire order, and the size of a page in tokens."""

    page_size: int
    dtype: str
    regions: tuple[Region, ...]

    @property
    def bytes_per_token(self) -> int:
        """The bytes that one token occupies over all regions."""
        return sum(region.bytes_per_token for region in self.regions)

    def item_bytes(self, region: int) -> int:
        """The bytes of one page in one region."""
        return self.regions[region].bytes_per_token * self.page_size

    def pages_for(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def region_offset(self, region: int, page_count: int) -> int:
        """Where a region begins in an arena of so many pages."""
        return self._offsets(page_count)[region]

    def arena_bytes(self, page_count: int) -> int:
        """The size of the KV part of an arena of so many pages."""
        return self._offsets(page_count)[-1]

    def page_offset(self, region: int, page: int, page_count: int) -> int:
        """Where a page begins in an arena of so many pages."""
        return self.region_offset(region, page_count) + page * self.item_bytes(region)

    def _offsets(self, page_count: int) -> list[int]:
        offsets = [0]
        for index in range(len(self.regions)):
            end = offsets[-1] + self.item_bytes(index) * page_count
            offsets.append(-(-end // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES)
        return offsets

    def digest(self) -> str:
        """16 hex digits that differ whenever bytes would mean something else."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def require_compatible(self, other: KVLayout) -> None:
        """Compare field by field.

        Raises:
            LayoutMismatch: naming the first field that differs with both values.
        """
        for field in ("page_size", "dtype"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                raise LayoutMismatch(f"{field}: ours is {ours!r}, the peer's is {theirs!r}")
        if len(self.regions) != len(other.regions):
            raise LayoutMismatch(
                f"regions: ours are {len(self.regions)}, the peer's are {len(other.regions)}"
            )
        for mine, peer in zip(self.regions, other.regions, strict=True):
            if mine != peer:
                raise LayoutMismatch(f"region {mine.name}: ours is {mine}, the peer's is {peer}")


def token_digest(token_ids: tuple[int, ...] | list[int]) -> str:
    """16 hex digits over the ids of a prompt; both legs must have the same ones."""
    packed = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.sha256(packed).hexdigest()[:16]
