"""Pairs of several ranks for the worlds: every kind of mapping, small enough for many seeds."""

from __future__ import annotations

from typing import Final

from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.rank_mapping import RowSpread
from pdcluster_protocol.topology import Parallelism
from simulation.memory import LAYOUT, Shape

HEADS: Final = KVLayout(
    page_size=4,
    dtype="float32",
    regions=tuple(
        Region(layer=layer, kind=kind, bytes_per_token=12, heads=4)
        for layer in range(3)
        for kind in ("key", "value")
    ),
)


def _shape(layout: KVLayout, prefill: dict[str, int], decode: dict[str, int]) -> Shape:
    spread = RowSpread.PAGE_RANGES if prefill.get("cp", 1) > 1 else RowSpread.FIRST_CP_RANK
    return Shape(layout, Parallelism(**prefill), Parallelism(**decode), spread)


SHAPES: Final = {
    "heads tp 1 to 2": _shape(HEADS, {}, {"tp": 2}),
    "heads tp 2 to 1": _shape(HEADS, {"tp": 2}, {}),
    "heads tp 4 to 2": _shape(HEADS, {"tp": 4}, {"tp": 2}),
    "heads tp 2 to 4": _shape(HEADS, {"tp": 2}, {"tp": 4}),
    "heads tp 2 to 8, more ranks than heads": _shape(HEADS, {"tp": 2}, {"tp": 8}),
    "heads tp 8 to 2, some hold copies": _shape(HEADS, {"tp": 8}, {"tp": 2}),
    "heads pp 2 to 1": _shape(HEADS, {"pp": 2}, {}),
    "heads pp 2 to 2, tp 2 to 1": _shape(HEADS, {"pp": 2, "tp": 2}, {"pp": 2}),
    "heads cp 2 to 1": _shape(HEADS, {"cp": 2, "tp": 2}, {}),
    "latent tp 4 to 2, with dummies": _shape(LAYOUT, {"tp": 4}, {"tp": 2}),
    "latent tp 1 to 2, replicated": _shape(LAYOUT, {}, {"tp": 2}),
    "latent pp 2 to 1": _shape(LAYOUT, {"pp": 2}, {}),
    "latent cp 2, tp 2 to 2": _shape(LAYOUT, {"cp": 2, "tp": 4}, {"tp": 2}),
    "latent first cp rank of 2": Shape(LAYOUT, Parallelism(tp=2, cp=2), Parallelism()),
}
