"""Cutting a prompt into runs, and finding what a list of runs does not cover."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.messages import Run
from pdcluster_protocol.push.routes import Part
from pdcluster_protocol.push.runs import (
    PIECES_MAX,
    PlannedRun,
    RunPlanner,
    coverage_fault,
    run_fault,
)
from pdcluster_protocol.segments import PagePair, RowSlice
from support.ledgers import LAYOUT, whole_parts, whole_planner

PAGES = (7, 8, 9, 3)
PROMPT = 14
ROWS = (16, 8)
SLOT = 2
POSITIONS = {page: position for position, page in enumerate(PAGES)}


def planner(
    sources: Sequence[int] = (0, 1, 2, 3), *, bytes_max: int = 1 << 20, tokens: int = PROMPT
) -> RunPlanner:
    return whole_planner(
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
        PlannedRun(0, 4, 0, 7, 2, 48),
        PlannedRun(0, 11, 0, 9, 1, 24),
        PlannedRun(0, 12, 0, 3, 1, 12),
    ] == runs


def test_a_run_is_at_most_so_many_bytes_but_at_least_one_page() -> None:
    assert [2, 1, 1] == [r.pages for r in finish(planner(bytes_max=71)) if r.region == 0]
    assert [1, 1, 1, 1] == [r.pages for r in finish(planner(bytes_max=1)) if r.region == 0]


def test_only_whole_pages_leave_before_the_prompt_is_complete() -> None:
    made = planner()
    made.rows_written(0, 3)
    assert [] == cut(made)
    made.rows_written(0, 7)
    assert [PlannedRun(0, 0, 0, 7, 1, 24)] == cut(made)
    made.rows_written(0, 5)
    assert [] == cut(made)
    made.rows_written(0, PROMPT)

    assert [PlannedRun(0, 1, 0, 8, 2, 48), PlannedRun(0, 3, 0, 3, 1, 12)] == cut(made)
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


def test_one_run_may_be_all_rows_of_the_slot() -> None:
    slot = Run(9, 3, SLOT, 1, 24, 0)
    runs = [*complete_runs()[:9], slot]

    assert "" == announced_fault(slot)
    assert "" == fault_of(runs)
    assert "metadata buffer 1 came twice" == fault_of([*runs, Run(10, 4, SLOT, 1, 8, 0)])
    for wrong in (
        Run(9, 4, SLOT, 1, 24, 0),
        Run(9, 3, SLOT, 1, 23, 0),
        Run(9, 3, SLOT, 1, 8, 0),
        Run(9, 3, SLOT + 1, 1, 24, 0),
        Run(9, 3, SLOT, 2, 24, 0),
    ):
        assert f"metadata run 9 is not of slot {SLOT}" == announced_fault(wrong)


@pytest.mark.parametrize(
    ("at", "changes", "what"),
    [
        (0, {"nbytes": 47}, "region 0: run 0 has 47 bytes for 8 rows"),
        (2, {"nbytes": 24}, "region 0: run 2 has 24 bytes for 2 rows"),
        (3, {"region": 0}, "region 0: run 3 is not the next part"),
        (1, {"first_page": 8}, "region 0: run 1 is not the next part"),
        (1, {"first_page": 99}, "region 0: run 1 is not the next part"),
        (0, {"pages": 3, "nbytes": 72}, "region 0: run 1 is not the next part"),
        (0, {"pages": 1, "nbytes": 24}, "region 0: run 1 is not the next part"),
        (9, {"region": 4}, "metadata buffer 1 came twice"),
    ],
)
def test_a_wrong_run_is_named(at: int, changes: dict[str, int], what: str) -> None:
    runs = complete_runs()
    runs[at] = msgspec.structs.replace(runs[at], **changes)

    assert what in fault_of(runs)


def test_what_is_missing_is_named() -> None:
    assert "region 1: it is not complete, no run of it came" == fault_of(
        [r for r in complete_runs() if r.region != 1]
    )
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
        (Run(0, 4, SLOT, 1, 0, 0), "metadata run 0 is not of slot 2"),
        (Run(0, 3, SLOT, 1, 0, 0), "metadata run 0 is not of slot 2"),
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


HEADS = KVLayout(4, "float32", (Region(0, "key", 12, heads=3), Region(0, "value", 12, heads=3)))


def part(region: int, head: int, *, held: int = 2) -> Part:
    """One head of a source that holds so many, to a destination that holds three."""
    return Part(region, RowSlice(region, 4 * (held - 1), 4 * held, region, 4 * head, 12, 4))


def test_a_part_of_each_row_goes_over_as_one_piece_a_row() -> None:
    pages = [PagePair(0, 5, 7), PagePair(1, 6, 8), PagePair(2, 9, 3)]
    made = RunPlanner([part(0, 1)], pages, prompt_tokens=10, page_size=4, bytes_max=1 << 20)
    made.rows_written(0, 10)

    assert [
        PlannedRun(0, 5, 0, 7, 2, 4, 8, 4, 4, 4, 8, 12),
        PlannedRun(0, 9, 0, 3, 1, 4, 2, 4, 4, 4, 8, 12),
    ] == cut(made)
    assert made.complete


def test_pieces_of_a_run_are_bounded_but_make_at_least_one_page() -> None:
    def pages_of(count: int, size: int) -> list[int]:
        pages = [PagePair(i, i, i) for i in range(count)]
        tokens = count * size
        made = RunPlanner([part(0, 1)], pages, prompt_tokens=tokens, page_size=size, bytes_max=9**9)
        made.rows_written(0, tokens)
        return [run.pages for run in cut(made)]

    assert [4, 4, 1] == pages_of(9, PIECES_MAX // 4)
    assert [1, 1] == pages_of(2, PIECES_MAX + 1)


def test_a_rank_that_sends_later_pages_waits_for_exactly_their_rows() -> None:
    pages = [PagePair(2, 4, 6), PagePair(3, 5, 7)]
    made = RunPlanner(whole_parts(LAYOUT)[:1], pages, prompt_tokens=14, page_size=4, bytes_max=999)
    made.rows_written(0, 11)
    assert [] == cut(made)
    made.rows_written(0, 12)
    assert [PlannedRun(0, 4, 0, 6, 1, 24)] == cut(made)
    made.rows_written(0, 14)

    assert [PlannedRun(0, 5, 0, 7, 1, 12)] == cut(made)
    assert made.complete


def test_a_rank_of_sharded_pages_sends_each_when_its_rows_are_final() -> None:
    # Neighbours here, and there by chance, but not in the prompt: they make no run.
    pages = [PagePair(1, 0, 8), PagePair(3, 1, 9), PagePair(4, 2, 10)]
    parts = whole_parts(LAYOUT)[:1]
    made = RunPlanner(parts, pages, prompt_tokens=18, page_size=4, bytes_max=1 << 20)
    cuts = []
    for ready in (7, 8, 15, 16, 17, 18):
        made.rows_written(0, ready)
        cuts.append(cut(made))

    first, second = PlannedRun(0, 0, 0, 8, 1, 24), PlannedRun(0, 1, 0, 9, 1, 24)
    assert [[], [first], [], [second], [], [PlannedRun(0, 2, 0, 10, 1, 12)]] == cuts
    assert made.complete


def test_a_rank_without_pages_or_parts_has_nothing_to_send() -> None:
    none = RunPlanner(whole_parts(LAYOUT), (), prompt_tokens=3, page_size=4, bytes_max=999)
    copy = RunPlanner((), [PagePair(0, 0, 0)], prompt_tokens=3, page_size=4, bytes_max=999)

    assert none.complete
    assert copy.complete


def head_runs() -> list[Run]:
    """Three ranks send one head each, of two regions, each in a cut of its own."""
    runs: list[Run] = []
    for head, cuts in enumerate([(7, 3, 12), (7, 2, 8), (9, 1, 4), (7, 3, 12)]):
        column = (0, 1, 1, 2)[head]
        for region in range(2):
            first, pages, rows = cuts
            runs.append(Run(len(runs), region, first, pages, rows * 4, 0, 4 * column, 4))
    return runs


def heads_fault(runs: Sequence[Run]) -> str:
    return coverage_fault(runs, layout=HEADS, pages=PAGES[:3], prompt_tokens=12, metadata_rows=())


def test_parts_of_rows_from_several_ranks_tile_them() -> None:
    assert "" == heads_fault(head_runs())
    assert "" == heads_fault(head_runs()[::-1])


@pytest.mark.parametrize("at", range(8))
def test_a_part_that_is_missing_or_doubled_is_found(at: int) -> None:
    runs = head_runs()

    assert "" != heads_fault(runs[:at] + runs[at + 1 :])
    assert "" != heads_fault([*runs, msgspec.structs.replace(runs[at], index=99)])


def test_parts_that_overlap_are_found() -> None:
    runs = head_runs()
    runs[0] = msgspec.structs.replace(runs[0], width=6, nbytes=72)

    assert "region 0: bytes 6 to 4 of its rows are not there once" == heads_fault(runs)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"offset": -4}, "bytes -4 to 0 of 12"),
        ({"offset": 12}, "bytes 12 to 16 of 12"),
        ({"width": -4}, "bytes 0 to -4 of 12"),
        ({"width": 13}, "bytes 0 to 13 of 12"),
        ({"offset": 1 << 62}, "of 12 in a row"),
        ({"nbytes": 5}, "1 pages and 5 bytes"),
        ({"nbytes": 20}, "1 pages and 20 bytes"),
    ],
    ids=str,
)
def test_a_part_outside_its_row_is_refused(changes: dict[str, int], what: str) -> None:
    run = msgspec.structs.replace(Run(0, 0, 7, 1, 16, 0, 0, 4), **changes)
    fault = run_fault(run, layout=HEADS, page_positions=POSITIONS, metadata_rows=(), slot=0)

    assert what in fault
