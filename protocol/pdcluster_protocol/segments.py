"""Which bytes go from one prefill rank to one decode rank, and to where.

Two steps, since one never changes while two replicas live and the other is new with each request:

    row_slices   the part of a row that goes over, per pair of regions (layers and heads that both
                 ranks have)
    segments     byte ranges of one prompt: those parts of its valid rows, on the pages that this
                 source sends

Together the segments of all real sources of a destination write each byte of each valid row once.
Where several sources hold the same head, the first one among the destination's targets writes it;
SGLang lets each of them write it, which is the same bytes again. The others are still real: they
report success, with nothing written.

Whole rows on consecutive pages of both sides make one segment; a part of a row is one segment a
token, because the next token's part is not its neighbour on at least one side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

import msgspec

from pdcluster_protocol.errors import LayoutMismatch
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.rank_layout import PER_HEAD_KINDS, kv_facts, rank_slice
from pdcluster_protocol.rank_mapping import RankMapping, RowSpread
from pdcluster_protocol.topology import RankCoordinate


class RowSlice(msgspec.Struct, frozen=True):
    """The part of each row that goes from a source's region into a destination's."""

    source_region: int
    """An index into the source rank's own layout."""
    source_offset: int
    """Where the part begins in a row."""
    source_row_bytes: int
    region: int
    """An index into the destination rank's own layout."""
    offset: int
    row_bytes: int
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether rows go over whole, so that several make one range on both sides."""
        return self.nbytes == self.source_row_bytes == self.row_bytes


class PagePair(msgspec.Struct, frozen=True):
    """One page of a prompt that a source sends."""

    position: int
    """Its place among the pages of the prompt."""
    source: int
    """The page in the source rank's own pool."""
    target: int


class Segment(msgspec.Struct, frozen=True):
    """One byte range; offsets are counted from the beginning of the page."""

    source_region: int
    source_page: int
    source_offset: int
    region: int
    page: int
    offset: int
    nbytes: int


def row_slices(
    mapping: RankMapping,
    layout: KVLayout,
    *,
    source: RankCoordinate,
    destination: RankCoordinate,
) -> tuple[RowSlice, ...]:
    """What of each row goes over; nothing if `source` writes nothing to `destination`.

    `layout` is the whole model's.

    Raises:
        LayoutMismatch: the mapping was made for other rows, or divides them by layers over CP.
        RankConflict: one of the ranks does not exist.
    """
    if mapping.facts != kv_facts(layout, spread=mapping.facts.spread):
        raise LayoutMismatch(f"the ranks are mapped for {mapping.facts}, not for this layout")
    if mapping.spread is RowSpread.LAYERS and mapping.prefill.cp > 1:
        raise LayoutMismatch("prefill splits layers over CP ranks; which ones, no rule says")
    targets = mapping.targets(destination, prefill_dp=source.dp)
    if source not in targets:
        return ()
    theirs = rank_slice(layout, mapping.prefill, source)
    ours = rank_slice(layout, mapping.decode, destination)
    places = {(r.layer, r.kind): i for i, r in enumerate(theirs.layout.regions)}
    slices: list[RowSlice] = []
    for index, region in enumerate(ours.layout.regions):
        place = places.get((region.layer, region.kind))
        if place is None or not _writes(mapping, targets[0].tp, source.tp, kind=region.kind):
            continue
        held = theirs.layout.regions[place]
        start = max(theirs.first_heads[place], ours.first_heads[index])
        stop = min(theirs.first_heads[place] + held.heads, ours.first_heads[index] + region.heads)
        if start >= stop:
            continue
        head_bytes = region.bytes_per_token // region.heads
        slices.append(
            RowSlice(
                source_region=place,
                source_offset=(start - theirs.first_heads[place]) * head_bytes,
                source_row_bytes=held.bytes_per_token,
                region=index,
                offset=(start - ours.first_heads[index]) * head_bytes,
                row_bytes=region.bytes_per_token,
                nbytes=(stop - start) * head_bytes,
            )
        )
    return tuple(slices)


def sent_pages(
    mapping: RankMapping,
    source: RankCoordinate,
    *,
    sources: Sequence[int],
    targets: Sequence[int],
) -> tuple[PagePair, ...]:
    """The pages of a prompt that a source sends, in order.

    `sources` and `targets` are the prompt's pages on both sides, equally many; of sharded pages
    `sources` are the numbers that all ranks of the shard have in common.
    """
    pairs = enumerate(zip(sources, targets, strict=True))
    pages = [PagePair(position, here, there) for position, (here, there) in pairs]
    ranks, rank = mapping.prefill.cp, source.cp
    if mapping.shards_over_tp:
        ranks, rank = mapping.prefill.attention_tp, source.tp
    match mapping.spread:
        case RowSpread.FIRST_CP_RANK | RowSpread.LAYERS:
            return tuple(pages)
        case RowSpread.PAGE_RANGES:
            start, stop = page_range(len(pages), rank, ranks)
            return tuple(pages[start:stop])
        case RowSpread.SHARDED_PAGES:
            return tuple(
                msgspec.structs.replace(page, source=page.source // ranks)
                for page in pages
                if page.source % ranks == rank
            )
        case _:
            assert_never(mapping.spread)


def segments(
    slices: Sequence[RowSlice], pages: Sequence[PagePair], *, tokens: int, page_size: int
) -> Iterator[Segment]:
    """The byte ranges of one prompt of so many tokens, slice by slice in the order of its rows.

    Each of `pages` holds at least one of the tokens; rows behind the last one are not sent.
    """
    runs = tuple(consecutive(pages))
    for part in slices:
        for run in runs:
            rows = min(tokens - run[0].position * page_size, len(run) * page_size)
            if part.whole:
                yield _segment(part, run[0], row=0, nbytes=rows * part.nbytes)
                continue
            for row in range(rows):
                page = run[row // page_size]
                yield _segment(part, page, row=row % page_size, nbytes=part.nbytes)


def consecutive(pages: Sequence[PagePair]) -> Iterator[Sequence[PagePair]]:
    """Longest runs of pages that follow each other in the prompt and on both sides."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index < len(pages) and follows(pages[index], pages[index - 1]):
            continue
        yield pages[start:index]
        start = index


def page_range(pages: int, rank: int, ranks: int) -> tuple[int, int]:
    """[start, stop) of a CP rank's part of a request's pages; the first ranks take one more."""
    share, extra = divmod(pages, ranks)
    start = rank * share + min(rank, extra)
    return start, start + share + (1 if rank < extra else 0)


def _writes(mapping: RankMapping, first_tp: int, tp: int, *, kind: str) -> bool:
    """Whether a source is the first of the destination's targets that holds its head.

    Rows without heads are one head that all TP ranks hold, so dummies write nothing either.
    """
    if mapping.shards_over_tp:
        return True
    heads = mapping.facts.heads if kind in PER_HEAD_KINDS else 1
    copies = max(1, mapping.prefill.attention_tp // heads)
    return tp == max(first_tp, tp - tp % copies)


def _segment(part: RowSlice, page: PagePair, *, row: int, nbytes: int) -> Segment:
    return Segment(
        source_region=part.source_region,
        source_page=page.source,
        source_offset=row * part.source_row_bytes + part.source_offset,
        region=part.region,
        page=page.target,
        offset=row * part.row_bytes + part.offset,
        nbytes=nbytes,
    )


def follows(page: PagePair, before: PagePair) -> bool:
    """Whether a page is the next one in the prompt and on both sides."""
    return (page.position, page.source, page.target) == (
        before.position + 1,
        before.source + 1,
        before.target + 1,
    )
