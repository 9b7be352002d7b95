"""What one rank holds of the whole model's KV rows.

A PP rank has the regions of its layers; of a region with heads a TP rank has its own ones, or, when
there are more ranks than heads, one of which its neighbours hold copies. Latent, rope and indexer
rows are whole in every TP rank. A rank's layout does not depend on its CP place: CP ranks divide
the pages of each request (`segments`).
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.rank_mapping import KVFacts, KVKind, RowSpread
from pdcluster_protocol.topology import Parallelism, RankCoordinate

PER_HEAD_KINDS = frozenset({"key", "value"})


class RankSlice(msgspec.Struct, frozen=True):
    """One rank's regions, and which heads of the whole model its rows begin with."""

    layout: KVLayout
    first_heads: tuple[int, ...]
    """Parallel to `layout.regions`; 0 where rows are whole."""


def kv_facts(layout: KVLayout, *, spread: RowSpread = RowSpread.FIRST_CP_RANK) -> KVFacts:
    """What the rank mapping must know of a whole model's layout.

    Raises:
        ConfigError: naming a region that the mapping has no rule for.
    """
    per_head = [region for region in layout.regions if region.kind in PER_HEAD_KINDS]
    layers = len({region.layer for region in layout.regions})
    if not per_head:
        return KVFacts(KVKind.LATENT, layers, spread=spread)
    heads = per_head[0].heads
    for region in layout.regions:
        if region.kind not in PER_HEAD_KINDS:
            raise ConfigError(f"region {region.name} has no heads, but {per_head[0].name} has")
        if region.heads != heads:
            raise ConfigError(f"region {region.name} has {region.heads} heads, others have {heads}")
        if region.bytes_per_token % heads != 0:
            raise ConfigError(
                f"region {region.name} has {region.bytes_per_token} bytes a token,"
                f" which {heads} heads do not divide"
            )
    return KVFacts(KVKind.PER_HEAD, layers, heads, spread)


def rank_slice(layout: KVLayout, parallel: Parallelism, rank: RankCoordinate) -> RankSlice:
    """What a rank holds; sizes and place have passed `RankMapping` or `require_side`."""
    layers = sorted({region.layer for region in layout.regions})
    start, stop = stage_layers(len(layers), rank.pp, parallel.pp)
    mine = set(layers[start:stop])
    size = parallel.attention_tp
    regions: list[Region] = []
    first_heads: list[int] = []
    for region in layout.regions:
        if region.layer not in mine:
            continue
        if region.kind not in PER_HEAD_KINDS:
            regions.append(region)
            first_heads.append(0)
            continue
        heads = max(1, region.heads // size)
        nbytes = region.bytes_per_token // region.heads * heads
        regions.append(msgspec.structs.replace(region, bytes_per_token=nbytes, heads=heads))
        first_heads.append(rank.tp * region.heads // size)
    own = msgspec.structs.replace(layout, regions=tuple(regions))
    return RankSlice(own, tuple(first_heads))


def stage_layers(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """[start, stop) of a pipeline stage's layers; the last stages take one more each."""
    share, extra = divmod(layers, stages)
    start = stage * share + max(0, stage - (stages - extra))
    return start, start + share + (1 if stage >= stages - extra else 0)
