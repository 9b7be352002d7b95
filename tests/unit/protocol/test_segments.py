"""Byte ranges by example: whole rows, parts of rows, copies, stages, page ranges, shards."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_protocol.errors import ConfigError, LayoutMismatch
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.rank_layout import kv_facts, rank_slice, stage_layers
from pdcluster_protocol.rank_mapping import KVFacts, KVKind, RankMapping, RowSpread
from pdcluster_protocol.segments import Segment, page_range, row_slices, segments, sent_pages
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.rank_matrix import shape

HEADS = KVLayout(4, "float16", (Region(0, "key", 40, 4), Region(0, "value", 40, 4)))
LATENT = KVLayout(4, "float16", (Region(0, "latent", 10), Region(1, "latent", 10)))


def cut(
    prefill: Parallelism,
    decode: Parallelism,
    *,
    source: RankCoordinate,
    layout: KVLayout = HEADS,
    spread: RowSpread = RowSpread.FIRST_CP_RANK,
    tokens: int = 11,
) -> list[Segment]:
    """From a source to decode's first rank, on three pages of which two are neighbours."""
    mapping = RankMapping(prefill, decode, kv_facts(layout, spread=spread))
    slices = row_slices(mapping, layout, source=source, destination=RankCoordinate())
    pages = sent_pages(mapping, source, sources=(6, 7, 2), targets=(0, 1, 5))
    return list(segments(slices, pages, tokens=tokens, page_size=layout.page_size))


def test_whole_rows_on_neighbouring_pages_are_one_segment() -> None:
    assert [
        Segment(0, 6, 0, 0, 0, 0, 8 * 40),
        Segment(0, 2, 0, 0, 5, 0, 3 * 40),
        Segment(1, 6, 0, 1, 0, 0, 8 * 40),
        Segment(1, 2, 0, 1, 5, 0, 3 * 40),
    ] == cut(shape(), shape(), source=RankCoordinate())


def test_heads_that_a_source_has_of_a_row_are_one_segment_a_token() -> None:
    found = cut(shape(tp=2), shape(), source=RankCoordinate(tp=1))

    assert 2 * 11 == len(found)
    assert [Segment(0, 6, row * 20, 0, 0, row * 40 + 20, 20) for row in range(4)] == found[:4]
    assert Segment(1, 2, 2 * 20, 1, 5, 2 * 40 + 20, 20) == found[-1]


def test_heads_that_a_destination_wants_of_a_row_are_one_segment_a_token() -> None:
    found = cut(shape(), shape(tp=4), source=RankCoordinate())

    assert [Segment(0, 7, row * 40, 0, 1, row * 10, 10) for row in range(4)] == found[4:8]


def test_of_ranks_that_hold_copies_of_a_head_the_first_target_writes_it() -> None:
    sources = [RankCoordinate(tp=tp) for tp in range(4)]
    counts = [len(cut(shape(tp=8), shape(tp=2), source=source)) for source in sources]

    assert [2 * 11, 0, 2 * 11, 0] == counts


def test_dummies_and_strangers_write_nothing() -> None:
    whole = [cut(shape(tp=4), shape(tp=2), source=RankCoordinate(tp=0), layout=LATENT)]
    others = [
        cut(shape(tp=4), shape(tp=2), source=RankCoordinate(tp=tp), layout=LATENT)
        for tp in (1, 2, 3)
    ]

    assert [4] == [len(found) for found in whole]
    assert [[], [], []] == others


def test_a_stage_writes_the_regions_of_its_layers() -> None:
    found = cut(shape(pp=2), shape(), source=RankCoordinate(pp=1), layout=LATENT, tokens=9)

    assert [Segment(0, 6, 0, 1, 0, 0, 80), Segment(0, 2, 0, 1, 5, 0, 10)] == found


def test_cp_ranks_write_their_ranges_of_the_pages() -> None:
    ranges = RowSpread.PAGE_RANGES
    layout = msgspec.structs.replace(LATENT, regions=LATENT.regions[:1])
    pages = [
        cut(shape(cp=2), shape(), source=RankCoordinate(cp=cp), layout=layout, spread=ranges)
        for cp in (0, 1)
    ]

    assert [[Segment(0, 6, 0, 0, 0, 0, 80)], [Segment(0, 2, 0, 0, 5, 0, 30)]] == pages


def test_sharded_pages_lie_where_their_numbers_say() -> None:
    layout = msgspec.structs.replace(LATENT, regions=LATENT.regions[:1])
    sharded = RowSpread.SHARDED_PAGES
    pages = [
        cut(shape(cp=2), shape(), source=RankCoordinate(cp=cp), layout=layout, spread=sharded)
        for cp in (0, 1)
    ]

    assert [
        [Segment(0, 3, 0, 0, 0, 0, 40), Segment(0, 1, 0, 0, 5, 0, 30)],
        [Segment(0, 3, 0, 0, 1, 0, 40)],
    ] == pages


def test_a_rank_slice_is_a_layout_of_its_own() -> None:
    sliced = rank_slice(HEADS, shape(tp=2), RankCoordinate(tp=1))

    assert (Region(0, "key", 20, 2), Region(0, "value", 20, 2)) == sliced.layout.regions
    assert (2, 2) == sliced.first_heads
    assert HEADS == rank_slice(HEADS, shape(), RankCoordinate()).layout
    assert LATENT == rank_slice(LATENT, shape(tp=8), RankCoordinate(tp=5)).layout


def test_the_last_stages_have_one_layer_more_and_the_first_cp_ranks_one_page() -> None:
    assert [(0, 2), (2, 5), (5, 8)] == [stage_layers(8, stage, 3) for stage in range(3)]
    assert [(0, 3), (3, 6), (6, 8)] == [page_range(8, rank, 3) for rank in range(3)]


@pytest.mark.parametrize(
    ("regions", "what"),
    [
        ((Region(0, "key", 8, 2), Region(0, "latent", 8)), "region 0.latent has no heads"),
        ((Region(0, "key", 8, 2), Region(1, "key", 8, 4)), "region 1.key has 4 heads, others"),
        ((Region(0, "key", 9, 2),), "region 0.key has 9 bytes a token, which 2 heads do not"),
    ],
)
def test_rows_without_a_rule_are_refused_by_name(regions: tuple[Region, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        kv_facts(KVLayout(4, "float16", regions))


def test_a_mapping_for_other_rows_or_layers_over_cp_cuts_nothing() -> None:
    place = RankCoordinate()
    hybrid = RankMapping(shape(), shape(), KVFacts(KVKind.HYBRID_LATENT, 2))
    with pytest.raises(LayoutMismatch, match="not for this layout"):
        row_slices(hybrid, LATENT, source=place, destination=place)
    facts = kv_facts(LATENT, spread=RowSpread.LAYERS)
    with pytest.raises(LayoutMismatch, match="prefill splits layers over CP ranks"):
        row_slices(
            RankMapping(shape(cp=2), shape(), facts), LATENT, source=place, destination=place
        )
    alone = RankMapping(shape(), shape(), facts)
    assert 2 == len(row_slices(alone, LATENT, source=place, destination=place))
