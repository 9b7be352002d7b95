"""Cutting a prompt into runs, and finding what a list of runs does not cover."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pdcluster_protocol.messages import Run
from pdcluster_protocol.push.runs import PlannedRun, RunPlanner, coverage_fault, run_fault
from support.ledgers import LAYOUT

PAGES = (7, 8, 9, 3)
PROMPT = 14
ROWS = (16, 8)
SLOT = 2
POSITIONS = {page: position for position, page in enumerate(PAGES)}


def planner(
    sources: Sequence[int] = (0, 1, 2, 3), *, bytes_max: int = 1 << 20, tokens: int = PROMPT
) -> RunPlanner:
    return RunPlanner(
        LAYOUT,
        prompt_tokens=tokens,
        sources=sources,
        targets=PAGES[: LAYOUT.pages_for(tokens)],
        bytes_max=bytes_max,
    )


def cut(made: RunPlanner) -> list[PlannedRun]:
    return list(iter(made.next, None))


def finish(made: RunPlanner, tokens: int = PROMPT) -> list[PlannedRun]:
    for region in range(len(LAYOUT.regions)):
        made.rows_written(region, tokens)
    return cut(made)


def test_a_run_is_contiguous_on_both_sides() -> None:
    # Targets break after 9, sources after 1.
    runs = [r for r in finish(planner((4, 5, 11, 12))) if r.region == 0]

    assert [
        PlannedRun(0, 4, 7, 2, 48),
        PlannedRun(0, 11, 9, 1, 24),
        PlannedRun(0, 12, 3, 1, 12),
    ] == runs


def test_a_run_is_at_most_so_many_bytes_but_at_least_one_page() -> None:
    assert [2, 1, 1] == [r.pages for r in finish(planner(bytes_max=71)) if r.region == 0]
    assert [1, 1, 1, 1] == [r.pages for r in finish(planner(bytes_max=1)) if r.region == 0]


def test_only_whole_pages_leave_before_the_prompt_is_complete() -> None:
    made = planner()
    made.rows_written(0, 3)
    assert [] == cut(made)
    made.rows_written(0, 7)
    assert [PlannedRun(0, 0, 7, 1, 24)] == cut(made)
    made.rows_written(0, 5)
    assert [] == cut(made)
    made.rows_written(0, PROMPT)

    assert [PlannedRun(0, 1, 8, 2, 48), PlannedRun(0, 3, 3, 1, 12)] == cut(made)
    assert not made.complete


def test_the_lowest_page_goes_first_over_all_regions() -> None:
    runs = finish(planner(bytes_max=1))

    assert [7, 7, 7, 8, 8, 8, 9, 9, 9, 3, 3, 3] == [r.first_page for r in runs]


@pytest.mark.parametrize(("tokens", "last"), [(1, 6), (4, 24), (5, 6), (16, 24)])
def test_the_last_page_carries_only_the_rows_of_the_prompt(tokens: int, last: int) -> None:
    made = planner(bytes_max=1, tokens=tokens)
    runs = [r for r in finish(made, tokens) if r.region == 0]

    assert last == runs[-1].nbytes
    assert tokens * 6 == sum(r.nbytes for r in runs)
    assert made.complete


def complete_runs() -> list[Run]:
    """What a rank announces for the prompt: three regions, then two metadata rows."""
    runs = [
        Run(index, region, first, pages, rows * LAYOUT.regions[region].bytes_per_token, 0)
        for index, (region, first, pages, rows) in enumerate(
            (region, *piece) for region in range(3) for piece in ((7, 2, 8), (9, 1, 4), (3, 1, 2))
        )
    ]
    return [*runs, Run(9, 3, SLOT, 1, 16, 0), Run(10, 4, SLOT, 1, 8, 0)]


def fault_of(runs: Sequence[Run]) -> str:
    return coverage_fault(
        runs, layout=LAYOUT, pages=PAGES, prompt_tokens=PROMPT, metadata_rows=ROWS
    )


def test_a_complete_list_covers_everything_in_any_order() -> None:
    runs = complete_runs()

    assert "" == fault_of(runs)
    assert "" == fault_of(runs[::-1])
    assert "" == fault_of(runs[5:] + runs[:5])


@pytest.mark.parametrize("at", range(11))
def test_a_run_that_is_missing_or_doubled_is_found(at: int) -> None:
    runs = complete_runs()

    assert "" != fault_of(runs[:at] + runs[at + 1 :])
    assert "" != fault_of([*runs, runs[at]])


@pytest.mark.parametrize(
    ("at", "changes", "what"),
    [
        (0, {"nbytes": 47}, "run 0 of region 0 has 47 bytes for 8 rows"),
        (2, {"nbytes": 24}, "run 2 of region 0 has 24 bytes for 2 rows"),
        (0, {"region": 1}, "run 0 of region 1"),
        (1, {"first_page": 8}, "run 1 of region 0 is not the next part"),
        (1, {"first_page": 99}, "run 1 of region 0 is not the next part"),
        (0, {"pages": 3, "nbytes": 72}, "run 1 of region 0 is not the next part"),
        (0, {"pages": 1, "nbytes": 24}, "run 1 of region 0 is not the next part"),
        (9, {"region": 4}, "metadata buffer 1 came twice"),
    ],
)
def test_a_wrong_run_is_named(at: int, changes: dict[str, int], what: str) -> None:
    runs = complete_runs()
    runs[at] = msgspec.structs.replace(runs[at], **changes)

    assert what in fault_of(runs)


def test_what_is_missing_is_named() -> None:
    assert "regions [1] are not complete" == fault_of([r for r in complete_runs() if r.region != 1])
    assert "metadata buffers [0] are missing" == fault_of(
        [r for r in complete_runs() if r.region != 3]
    )


def announced_fault(run: Run) -> str:
    return run_fault(run, layout=LAYOUT, page_positions=POSITIONS, metadata_rows=ROWS, slot=SLOT)


def test_every_run_of_a_complete_list_may_be_of_the_request() -> None:
    assert [""] * 11 == [announced_fault(run) for run in complete_runs()]


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (Run(0, -1, 7, 1, 24, 0), "region -1 does not exist"),
        (Run(0, 5, 7, 1, 24, 0), "region 5 does not exist"),
        (Run(0, 3, 1, 1, 16, 0), "metadata run 0 is not of slot 2"),
        (Run(0, 3, SLOT, 2, 16, 0), "metadata run 0 is not of slot 2"),
        (Run(0, 4, SLOT, 1, 16, 0), "metadata run 0 is not of slot 2"),
        (Run(0, 0, 7, 0, 24, 0), "run 0 has 0 pages"),
        (Run(0, 0, 7, -1, 24, 0), "run 0 has -1 pages"),
        (Run(0, 0, 7, 1, 0, 0), "run 0 has 1 pages and 0 bytes"),
        (Run(0, 0, 7, 1, -24, 0), "run 0 has 1 pages and -24 bytes"),
        (Run(0, 0, 7, 2, 49, 0), "run 0 has 2 pages and 49 bytes"),
        (Run(0, 0, 6, 1, 24, 0), "page 6 of run 0 is not of this request"),
        (Run(0, 0, -7, 1, 24, 0), "page -7 of run 0 is not of this request"),
        (Run(0, 0, 7, 1 << 60, 24, 0), "page 7 of run 0 is not of this request"),
        # Page 10 follows 9 in memory, page 3 in the request.
        (Run(0, 0, 9, 2, 48, 0), "page 10 of run 0 is not of this request"),
        (Run(0, 0, 3, 2, 48, 0), "page 3 of run 0 is not of this request"),
    ],
    ids=str,
)
def test_a_run_outside_the_request_is_refused_before_a_byte_is_hashed(run: Run, what: str) -> None:
    assert what in announced_fault(run)
