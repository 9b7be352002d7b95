"""Runs: what one write carries, on both sides.

Prefill cuts the rows of a prompt into runs: contiguous in both arenas, whole pages except the
prompt's last one, at most `run_bytes_max` long. Where a rank sends a part of each row only, a run
is one piece a row, equally far apart. Decode checks that the runs it verified tile every row of
every region exactly once before it lets anybody read: a digest per run cannot notice a run that is
missing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.messages import Run
from pdcluster_protocol.push.routes import Part
from pdcluster_protocol.segments import PagePair, follows

PIECES_MAX: Final = 4096
"""Rows of a run where only a part of each goes over, unless one page has more."""


class PlannedRun(msgspec.Struct, frozen=True):
    """A run before it is written."""

    source_region: int
    """In the writing rank's own layout; from its end on, a metadata buffer."""
    source_page: int
    region: int
    """In the destination rank's layout; from its end on, a metadata buffer."""
    first_page: int
    pages: int
    nbytes: int
    """Of one piece."""
    pieces: int = 1
    source_offset: int = 0
    """Where the part begins in each row, here and there."""
    offset: int = 0
    width: int = 0
    """Bytes of each row that go over; 0: whole rows."""
    source_stride: int = 0
    stride: int = 0
    metadata: bool = False


class RunPlanner:
    """Cuts what one rank sends to one destination, as its rows become final."""

    __slots__ = (
        "_bytes_max",
        "_cuttable",
        "_left",
        "_page_size",
        "_pages",
        "_parts",
        "_planned",
        "_prompt_tokens",
        "_ready",
    )

    def __init__(
        self,
        parts: Sequence[Part],
        pages: Sequence[PagePair],
        *,
        prompt_tokens: int,
        page_size: int,
        bytes_max: int,
    ) -> None:
        self._parts = parts if pages else ()
        self._pages = pages
        """In the order of the prompt; a rank of sharded pages has not all of them."""
        self._prompt_tokens = prompt_tokens
        self._page_size = page_size
        self._bytes_max = bytes_max
        self._ready = [0] * len(self._parts)
        """Pages of each part whose rows are final, and below those that were cut into runs."""
        self._planned = [0] * len(self._parts)
        self._cuttable = 0
        self._left = len(self._parts) * len(pages)
        """Pages over all parts that can be cut now, and that are not cut yet."""

    def rows_written(self, region: int, end: int) -> None:
        """The rows of a region of the whole layout up to token `end` are final."""
        final = self._final(end)
        for index, part in enumerate(self._parts):
            if part.region == region:
                more = max(final - self._ready[index], 0)
                self._ready[index] += more
                self._cuttable += more

    @property
    def complete(self) -> bool:
        """Whether every row has been cut into a run."""
        return self._left == 0

    def next(self) -> PlannedRun | None:
        """The next run whose rows are final, lowest page first, or None."""
        if not self._cuttable:
            return None
        best: int | None = None
        for index, planned in enumerate(self._planned):
            if self._ready[index] > planned and (best is None or planned < self._planned[best]):
                best = index
        return None if best is None else self._cut(best)

    def _final(self, end: int) -> int:
        """How many of our pages are final when the rows up to token `end` are."""
        if end >= self._prompt_tokens:
            return len(self._pages)
        return bisect_left(self._pages, end // self._page_size, key=lambda page: page.position)

    def _cut(self, index: int) -> PlannedRun:
        part, start = self._parts[index].rows, self._planned[index]
        first = self._pages[start]
        length = self._length(index, start)
        self._planned[index] = start + length
        self._cuttable -= length
        self._left -= length
        rows = min(self._prompt_tokens - first.position * self._page_size, length * self._page_size)
        run = PlannedRun(
            source_region=part.source_region,
            source_page=first.source,
            region=part.region,
            first_page=first.target,
            pages=length,
            nbytes=rows * part.nbytes,
        )
        if part.whole:
            return run
        return msgspec.structs.replace(
            run,
            nbytes=part.nbytes,
            pieces=rows,
            source_offset=part.source_offset,
            offset=part.offset,
            width=part.nbytes,
            source_stride=part.source_row_bytes,
            stride=part.row_bytes,
        )

    def _length(self, index: int, start: int) -> int:
        """How many pages from `start` on make one run."""
        part = self._parts[index].rows
        page_bytes = part.nbytes * self._page_size
        pages_max = max(1, self._bytes_max // page_bytes)
        if not part.whole:
            pages_max = max(1, min(pages_max, PIECES_MAX // self._page_size))
        length = 1
        while (
            length < pages_max
            and start + length < self._ready[index]
            and follows(self._pages[start + length], self._pages[start + length - 1])
        ):
            length += 1
        return length


def coverage_fault(
    runs: Sequence[Run],
    *,
    layout: KVLayout,
    pages: Sequence[int],
    prompt_tokens: int,
    metadata_rows: Sequence[int],
) -> str:
    """What is missing or wrong in a complete list of runs; empty when every byte is there once.

    `layout` is this rank's own, `metadata_rows` are the bytes of one slot in each metadata buffer.
    One run may be the whole slot. The order of the runs means nothing: writes end in any order.
    Each run has passed `run_fault`.
    """
    place = {page: index for index, page in enumerate(pages)}
    columns: list[dict[tuple[int, int], list[Run]]] = [{} for _ in layout.regions]
    rows: list[Run] = []
    for run in runs:
        if run.region < len(layout.regions):
            column = (run.offset, run.width or layout.regions[run.region].bytes_per_token)
            columns[run.region].setdefault(column, []).append(run)
            continue
        rows.append(run)
    for index, region in enumerate(layout.regions):
        fault = _columns_fault(columns[index], region.bytes_per_token)
        for column, its_runs in columns[index].items():
            fault = fault or _pages_fault(
                sorted(its_runs, key=lambda run: place.get(run.first_page, -1)),
                pages=pages,
                prompt_tokens=prompt_tokens,
                page_size=layout.page_size,
                row_bytes=column[1],
            )
        if fault:
            return f"region {index}: {fault}"
    return _rows_fault(rows, first=len(layout.regions), metadata_rows=metadata_rows)


def _rows_fault(runs: Sequence[Run], *, first: int, metadata_rows: Sequence[int]) -> str:
    """Whether every metadata row is there once, by itself or with its whole slot."""
    seen = [False] * len(metadata_rows)
    for run in runs:
        buffer = run.region - first
        whole = buffer == 0 and run.nbytes == sum(metadata_rows)
        for row in range(len(metadata_rows)) if whole else (buffer,):
            if seen[row]:
                return f"metadata buffer {row} came twice"
            seen[row] = True
    missing = [row for row, came in enumerate(seen) if not came]
    return f"metadata buffers {missing} are missing" if missing else ""


def _columns_fault(columns: dict[tuple[int, int], list[Run]], row_bytes: int) -> str:
    """Whether the parts of its rows tile a region's row."""
    ordered = sorted(columns)
    if not ordered:
        return "it is not complete, no run of it came"
    ends = [(0, 0), *ordered, (row_bytes, 0)]
    for (offset, width), (following, _) in pairwise(ends):
        if offset + width != following:
            return f"bytes {offset + width} to {following} of its rows are not there once"
    return ""


def _pages_fault(
    runs: Sequence[Run],
    *,
    pages: Sequence[int],
    prompt_tokens: int,
    page_size: int,
    row_bytes: int,
) -> str:
    """Whether runs in the order of the prompt cover its pages once."""
    at = 0
    for run in runs:
        expected = pages[at : at + run.pages]
        if tuple(expected) != tuple(range(run.first_page, run.first_page + run.pages)):
            return f"run {run.index} is not the next part of the prompt"
        rows = min(prompt_tokens - at * page_size, run.pages * page_size)
        if run.nbytes != rows * row_bytes:
            return f"run {run.index} has {run.nbytes} bytes for {rows} rows"
        at += run.pages
    return "" if at == len(pages) else f"it is not complete, page {at} of {len(pages)} is missing"


def run_fault(
    run: Run,
    *,
    layout: KVLayout,
    page_positions: dict[int, int],
    metadata_rows: Sequence[int],
    slot: int,
) -> str:
    """Why one announced run cannot be of this request; empty when it may be.

    Bounds are checked before a byte is hashed: a run is peer input.
    """
    if run.region < 0 or run.region >= len(layout.regions) + len(metadata_rows):
        return f"region {run.region} does not exist"
    if run.region >= len(layout.regions):
        buffer = run.region - len(layout.regions)
        lengths = {metadata_rows[buffer]} | ({sum(metadata_rows)} if buffer == 0 else set())
        place = (run.first_page, run.pages, run.offset, run.width)
        if place != (slot, 1, 0, 0) or run.nbytes not in lengths:
            return f"metadata run {run.index} is not of slot {slot}"
        return ""
    fault = _size_fault(run, layout)
    if fault:
        return fault
    start = page_positions.get(run.first_page)
    if start is None or run.pages > len(page_positions) - start:
        return f"page {run.first_page} of run {run.index} is not of this request"
    for ahead in range(1, run.pages):
        if page_positions.get(run.first_page + ahead) != start + ahead:
            return f"page {run.first_page + ahead} of run {run.index} is not of this request"
    return ""


def _size_fault(run: Run, layout: KVLayout) -> str:
    row = layout.regions[run.region].bytes_per_token
    width = run.width or row
    if run.offset < 0 or run.width < 0 or run.offset + width > row:
        return f"run {run.index} has bytes {run.offset} to {run.offset + width} of {row} in a row"
    most = run.pages * layout.page_size * width
    if run.pages < 1 or not 0 < run.nbytes <= most or run.nbytes % width:
        return f"run {run.index} has {run.pages} pages and {run.nbytes} bytes"
    return ""
