"""Runs: what one write carries, on both sides.

Prefill cuts the rows of a prompt into runs: contiguous in both arenas, whole pages except the
prompt's last one, at most `run_bytes_max` long. Decode checks that the runs it verified cover every
row of every region exactly once before it lets anybody read: a digest per run cannot notice a run
that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.messages import Run


class PlannedRun(msgspec.Struct, frozen=True):
    """A run before it is written."""

    region: int
    source_page: int
    first_page: int
    pages: int
    nbytes: int


class RunPlanner:
    """Cuts the rows of one prompt for one destination, as they become final."""

    __slots__ = (
        "_bytes_max",
        "_layout",
        "_planned",
        "_prompt_tokens",
        "_ready",
        "_sources",
        "_targets",
    )

    def __init__(
        self,
        layout: KVLayout,
        *,
        prompt_tokens: int,
        sources: Sequence[int],
        targets: Sequence[int],
        bytes_max: int,
    ) -> None:
        self._layout = layout
        self._prompt_tokens = prompt_tokens
        self._sources = sources
        self._targets = targets
        self._bytes_max = bytes_max
        self._ready = [0] * len(layout.regions)
        self._planned = [0] * len(layout.regions)

    def rows_written(self, region: int, end: int) -> None:
        """The rows of `region` up to token `end` are final."""
        self._ready[region] = max(self._ready[region], end)

    @property
    def complete(self) -> bool:
        """Whether every row of every region has been cut into a run."""
        return all(page == len(self._targets) for page in self._planned)

    def next(self) -> PlannedRun | None:
        """The next run whose rows are final, lowest page first, or None."""
        best: int | None = None
        for region, planned in enumerate(self._planned):
            if self._pages_ready(region) > planned and (
                best is None or planned < self._planned[best]
            ):
                best = region
        return None if best is None else self._cut(best)

    def _pages_ready(self, region: int) -> int:
        ready = self._ready[region]
        if ready >= self._prompt_tokens:
            return len(self._targets)
        return ready // self._layout.page_size

    def _cut(self, region: int) -> PlannedRun:
        start, stop = self._planned[region], self._pages_ready(region)
        item = self._layout.item_bytes(region)
        length = 1
        while (
            start + length < stop
            and (length + 1) * item <= self._bytes_max
            and self._sources[start + length] == self._sources[start] + length
            and self._targets[start + length] == self._targets[start] + length
        ):
            length += 1
        self._planned[region] = start + length
        rows = min(
            self._prompt_tokens - start * self._layout.page_size, length * self._layout.page_size
        )
        nbytes = rows * self._layout.regions[region].bytes_per_token
        return PlannedRun(region, self._sources[start], self._targets[start], length, nbytes)


def coverage_fault(
    runs: Sequence[Run],
    *,
    layout: KVLayout,
    pages: Sequence[int],
    prompt_tokens: int,
    metadata_rows: Sequence[int],
) -> str:
    """What is missing or wrong in a complete list of runs; empty when every byte is there once.

    `metadata_rows` are the bytes of one slot in each metadata buffer. The order of the runs means
    nothing: writes end in any order. Each run has passed `run_fault`.
    """
    place = {page: index for index, page in enumerate(pages)}
    position = [0] * len(layout.regions)
    rows_seen = [False] * len(metadata_rows)
    for run in sorted(runs, key=lambda run: place.get(run.first_page, -1)):
        if run.region >= len(layout.regions):
            buffer = run.region - len(layout.regions)
            if rows_seen[buffer]:
                return f"metadata buffer {buffer} came twice"
            rows_seen[buffer] = True
            continue
        at = position[run.region]
        expected = pages[at : at + run.pages]
        if tuple(expected) != tuple(range(run.first_page, run.first_page + run.pages)):
            return f"run {run.index} of region {run.region} is not the next part of the prompt"
        rows = min(prompt_tokens - at * layout.page_size, run.pages * layout.page_size)
        if run.nbytes != rows * layout.regions[run.region].bytes_per_token:
            return f"run {run.index} of region {run.region} has {run.nbytes} bytes for {rows} rows"
        position[run.region] = at + run.pages
    missing = [i for i, at in enumerate(position) if at != len(pages)]
    if missing:
        return f"regions {missing[:8]} are not complete"
    if not all(rows_seen):
        return f"metadata buffers {[i for i, seen in enumerate(rows_seen) if not seen]} are missing"
    return ""


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
        row = metadata_rows[run.region - len(layout.regions)]
        if run.first_page != slot or run.pages != 1 or run.nbytes != row:
            return f"metadata run {run.index} is not of slot {slot}"
        return ""
    if run.pages < 1 or run.nbytes < 1 or run.nbytes > run.pages * layout.item_bytes(run.region):
        return f"run {run.index} has {run.pages} pages and {run.nbytes} bytes"
    start = page_positions.get(run.first_page)
    if start is None or run.pages > len(page_positions) - start:
        return f"page {run.first_page} of run {run.index} is not of this request"
    for ahead in range(1, run.pages):
        if page_positions.get(run.first_page + ahead) != start + ahead:
            return f"page {run.first_page + ahead} of run {run.index} is not of this request"
    return ""
