"""Every byte of every destination's rows is written exactly once, over the whole rank matrix.

The oracle is a memory whose cells say what they hold: (token, layer, kind, head, byte) of the whole
model. Who holds what is dealt out card by card, not divided. Bytes are counted as well as compared:
if every cell has its right content and the segments together are as long as the rows, none was
written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import LayoutMismatch
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.rank_layout import kv_facts, rank_slice
from pdcluster_protocol.rank_mapping import RankMapping, RowSpread
from pdcluster_protocol.segments import row_slices, segments, sent_pages
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.rank_matrix import ranks_of, shape, shapes

PAGE_SIZE = 2
TOKENS = 9
SOURCES = (4, 5, 6, 2, 9)
TARGETS = (7, 8, 3, 4, 1)
POOL_PAGES = 10
UNTOUCHED = 0
CUT_SPREADS = (RowSpread.FIRST_CP_RANK, RowSpread.PAGE_RANGES, RowSpread.SHARDED_PAGES)

HEADS = (0, 1, 2, 6, 8)

Memory = dict[tuple[int, str], list[object]]


class Model(NamedTuple):
    """What memories are made from; 0 heads: latent rows, with indexer keys on even layers."""

    heads: int
    layers: int


@cache
def layout_of(model: Model) -> KVLayout:
    heads, layers = model
    regions: list[Region] = []
    for layer in range(layers):
        if heads:
            regions += [
                Region(layer, "key", heads, heads),
                Region(layer, "value", 2 * heads, heads),
            ]
            continue
        regions += [Region(layer, "latent", 3), Region(layer, "rope", 1)]
        if layer % 2 == 0:
            regions.append(Region(layer, "indexer", 2))
    return KVLayout(PAGE_SIZE, "float8", tuple(regions))


@cache
def own_layout(model: Model, parallel: Parallelism, rank: RankCoordinate) -> KVLayout:
    return rank_slice(layout_of(model), parallel, rank).layout


def dealt(count: int, hands: int, *, last_first: bool = False) -> list[list[int]]:
    """`count` things in order, in as equal parts as possible."""
    sizes = [0] * hands
    for card in range(count):
        sizes[-1 - card % hands if last_first else card % hands] += 1
    things = iter(range(count))
    return [[next(things) for _ in range(size)] for size in sizes]


@cache
def held_heads(tp: int, ranks: int, heads: int) -> list[int]:
    """Heads whose share of the rank's share is not empty, in 1/(ranks × heads) steps."""
    mine = set(range(tp * heads, (tp + 1) * heads))
    return [head for head in range(heads) if mine & set(range(head * ranks, (head + 1) * ranks))]


@cache
def row_cells(
    model: Model, parallel: Parallelism, tp: int, pp: int
) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """(head, byte) of each byte of a row, by region, in the rank's order."""
    mine = dealt(model.layers, parallel.pp, last_first=True)[pp]
    cells: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for region in layout_of(model).regions:
        if region.layer in mine:
            width = region.bytes_per_token // region.heads
            heads = [0]
            if region.kind in ("key", "value"):
                heads = held_heads(tp, parallel.attention_tp, region.heads)
            cells[region.layer, region.kind] = [(h, b) for h in heads for b in range(width)]
    return cells


def rows_at(pages: dict[int, int]) -> Iterator[tuple[int, int]]:
    """(token, row of the pool) of a prompt whose page number `position` lies at a pool page."""
    for token in range(TOKENS):
        if token // PAGE_SIZE in pages:
            yield token, pages[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE


def memory(
    model: Model, parallel: Parallelism, rank: RankCoordinate, pages: dict[int, int]
) -> Memory:
    """A rank's pool with a prompt at these pages, and nothing elsewhere."""
    filled: Memory = {}
    for (layer, kind), cells in row_cells(model, parallel, rank.tp, rank.pp).items():
        width = len(cells)
        region: list[object] = [UNTOUCHED] * (POOL_PAGES * PAGE_SIZE * width)
        for token, row in rows_at(pages):
            held: list[object] = [(token, layer, kind, head, byte) for head, byte in cells]
            region[row * width : (row + 1) * width] = held
        filled[layer, kind] = region
    return filled


@cache
def source_memory(
    model: Model, parallel: Parallelism, rank: RankCoordinate, spread: RowSpread
) -> Memory:
    """What a prefill rank has of the prompt under a spread."""
    pages = dict(enumerate(SOURCES))
    if spread is RowSpread.PAGE_RANGES:
        mine = dealt(len(SOURCES), parallel.cp)[rank.cp]
        pages = {position: page for position, page in pages.items() if position in mine}
    elif spread is RowSpread.SHARDED_PAGES:
        over_tp = model.heads == 0 and parallel.cp == 1
        hands = parallel.attention_tp if over_tp else parallel.cp
        place = rank.tp if over_tp else rank.cp
        # The pages that all ranks count together are dealt one by one.
        local = {page: i for i, page in enumerate(range(place, POOL_PAGES, hands))}
        pages = {position: local[page] for position, page in pages.items() if page in local}
    return memory(model, parallel, rank, pages)


@cache
def destination_memory(model: Model, parallel: Parallelism, rank: RankCoordinate) -> Memory:
    """What a decode rank must have when all is written."""
    return memory(model, parallel, rank, dict(enumerate(TARGETS)))


def write(
    mapping: RankMapping,
    model: Model,
    source: RankCoordinate,
    destination: RankCoordinate,
    into: Memory,
) -> int:
    """Do what the segments say; the bytes written."""
    slices = row_slices(mapping, layout_of(model), source=source, destination=destination)
    if not slices:
        return 0
    pages = sent_pages(mapping, source, sources=SOURCES, targets=TARGETS)
    theirs = own_layout(model, mapping.prefill, source)
    ours = own_layout(model, mapping.decode, destination)
    held = source_memory(model, mapping.prefill, source, mapping.spread)
    total = 0
    for segment in segments(slices, pages, tokens=TOKENS, page_size=PAGE_SIZE):
        there, here = theirs.regions[segment.source_region], ours.regions[segment.region]
        start = segment.source_page * theirs.item_bytes(segment.source_region)
        start += segment.source_offset
        end = segment.page * ours.item_bytes(segment.region) + segment.offset
        carried = held[there.layer, there.kind][start : start + segment.nbytes]
        assert segment.nbytes == len(carried) > 0
        into[here.layer, here.kind][end : end + segment.nbytes] = carried
        total += segment.nbytes
    return total


def check(mapping: RankMapping, model: Model) -> int:
    """All sources write to all destinations of one DP rank; the number of destinations."""
    dp = mapping.prefill.dp - 1
    sources = list(ranks_of(mapping.prefill, dp=dp))
    decode_ranks = list(ranks_of(mapping.decode, dp=mapping.decode.dp - 1))
    for rank in decode_ranks:
        expected = destination_memory(model, mapping.decode, rank)
        written: Memory = {key: [UNTOUCHED] * len(region) for key, region in expected.items()}
        total = sum(write(mapping, model, source, rank, written) for source in sources)
        assert expected == written, (mapping, rank)
        own = own_layout(model, mapping.decode, rank)
        assert TOKENS * own.bytes_per_token == total, (mapping, rank)
    return len(decode_ranks)


def largest_dp(parallel: Parallelism) -> bool:
    """One DP size for each of the other sizes: DP only relabels, which the mapping's test shows."""
    return parallel.dp == min(8, 16 // parallel.ranks_per_dp)


def test_6231_mappings_write_each_byte_of_33393_destinations_once() -> None:
    matrix = [parallel for parallel in shapes() if largest_dp(parallel)]
    mappings = destinations = 0
    for prefill in matrix:
        for decode in (parallel for parallel in matrix if parallel.cp == 1):
            for heads in HEADS:
                model = Model(heads, prefill.pp + 1)
                for spread in CUT_SPREADS if prefill.cp > 1 or heads == 0 else CUT_SPREADS[:1]:
                    facts = kv_facts(layout_of(model), spread=spread)
                    try:
                        mapping = RankMapping(prefill, decode, facts)
                    except LayoutMismatch:
                        continue
                    mappings += 1
                    destinations += check(mapping, model)
    assert (6231, 33393) == (mappings, destinations)


@st.composite
def page_lists(draw: st.DrawFn, count: int) -> list[int]:
    """Distinct pages, some of them neighbours."""
    pages = list(range(3 * count))
    cut = draw(st.integers(0, len(pages)))
    some = pages[cut:] + pages[:cut]
    return some[:count] if draw(st.booleans()) else draw(st.permutations(some))[:count]


@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.sampled_from(CUT_SPREADS))
def test_the_segments_of_any_prompt_tile_its_rows_and_stay_inside_its_pages(
    data: st.DataObject, page_size: int, tokens: int, spread: RowSpread
) -> None:
    layout = msgspec.structs.replace(layout_of(Model(4, 3)), page_size=page_size)
    mapping = RankMapping(shape(tp=4, pp=2, cp=2), shape(tp=2), kv_facts(layout, spread=spread))
    sources = data.draw(page_lists(layout.pages_for(tokens)))
    targets = data.draw(page_lists(layout.pages_for(tokens)))
    destination = RankCoordinate(tp=1)
    own = rank_slice(layout, mapping.decode, destination).layout
    written: list[tuple[int, int]] = []
    for source in ranks_of(mapping.prefill, dp=0):
        slices = row_slices(mapping, layout, source=source, destination=destination)
        pages = sent_pages(mapping, source, sources=sources, targets=targets)
        for part in segments(slices, pages, tokens=tokens, page_size=page_size):
            start = part.page * own.item_bytes(part.region) + part.offset
            written += [(part.region, byte) for byte in range(start, start + part.nbytes)]
    expected = {
        (index, (targets[token // page_size] * page_size + token % page_size) * width + byte)
        for index, width in enumerate(region.bytes_per_token for region in own.regions)
        for token in range(tokens)
        for byte in range(width)
    }
    assert expected == set(written)
    assert len(expected) == len(written)
