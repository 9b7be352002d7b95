"""Cut runs cover a prompt exactly; any run that is lost, doubled or altered is found."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.messages import Run
from pdcluster_protocol.push.runs import PlannedRun, coverage_fault, run_fault
from support.ledgers import whole_planner

SLOT = 3
PAGE_COUNT = 40


class Transfer(NamedTuple):
    """One prompt, where it lies on both sides, and the order in which rows become final."""

    layout: KVLayout
    tokens: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    bytes_max: int
    rows: tuple[int, ...]


@st.composite
def page_lists(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Distinct pages: neighbours, scattered, or some of both."""
    if draw(st.booleans()):
        start = draw(st.integers(0, PAGE_COUNT - count))
        pages = list(range(start, start + count))
    else:
        pages = draw(st.permutations(range(PAGE_COUNT)))[:count]
    if count > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, count - 1))
        pages = pages[cut:] + pages[:cut]
    return tuple(pages)


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    widths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    layout = KVLayout(
        draw(st.integers(1, 5)),
        "float32",
        tuple(Region(i, "latent", width) for i, width in enumerate(widths)),
    )
    tokens = draw(st.integers(1, 12 * layout.page_size))
    count = layout.pages_for(tokens)
    return Transfer(
        layout,
        tokens,
        draw(page_lists(count)),
        draw(page_lists(count)),
        draw(st.integers(1, 200)),
        tuple(draw(st.lists(st.integers(0, tokens), max_size=6))),
    )


def cut(transfer: Transfer) -> list[PlannedRun]:
    """All runs, taken out between reports of final rows."""
    planner = whole_planner(
        transfer.layout,
        prompt_tokens=transfer.tokens,
        sources=transfer.sources,
        targets=transfer.targets,
        bytes_max=transfer.bytes_max,
    )
    positions = {page: position for position, page in enumerate(transfer.targets)}
    ready = dict.fromkeys(range(len(transfer.layout.regions)), 0)
    runs: list[PlannedRun] = []
    for end in (*transfer.rows, transfer.tokens):
        for region in ready:
            planner.rows_written(region, end)
            ready[region] = max(ready[region], end)
            for run in iter(planner.next, None):
                pages = positions[run.first_page] + run.pages
                assert min(pages * transfer.layout.page_size, transfer.tokens) <= ready[run.region]
                runs.append(run)
    assert planner.complete
    return runs


METADATA = (16, 8)


def announced(transfer: Transfer) -> list[Run]:
    regions = len(transfer.layout.regions)
    runs = [
        Run(index, run.region, run.first_page, run.pages, run.nbytes, 0)
        for index, run in enumerate(cut(transfer))
    ]
    rows = [
        Run(len(runs) + buffer, regions + buffer, SLOT, 1, nbytes, 0)
        for buffer, nbytes in enumerate(METADATA)
    ]
    return runs + rows


def fault(transfer: Transfer, runs: list[Run]) -> str:
    """What decode says: first of each run, then of all of them."""
    positions = {page: position for position, page in enumerate(transfer.targets)}
    for run in runs:
        found = run_fault(
            run,
            layout=transfer.layout,
            page_positions=positions,
            metadata_rows=METADATA,
            slot=SLOT,
        )
        if found:
            return found
    return coverage_fault(
        runs,
        layout=transfer.layout,
        pages=transfer.targets,
        prompt_tokens=transfer.tokens,
        metadata_rows=METADATA,
    )


@given(transfers())
def test_every_row_is_carried_once_from_its_page_to_its_page(transfer: Transfer) -> None:
    layout = transfer.layout
    carried: dict[tuple[int, int], tuple[int, int]] = {}
    for run in cut(transfer):
        width = layout.regions[run.region].bytes_per_token
        assert run.pages == 1 or run.pages * layout.item_bytes(run.region) <= transfer.bytes_max
        assert 0 == run.nbytes % width
        assert 0 < run.nbytes <= run.pages * layout.item_bytes(run.region)
        for row in range(run.nbytes // width):
            source = run.source_page * layout.page_size + row
            target = run.first_page * layout.page_size + row
            assert (run.region, target) not in carried
            carried[run.region, target] = (run.region, source)

    def row_of(pages: tuple[int, ...], token: int) -> int:
        return pages[token // layout.page_size] * layout.page_size + token % layout.page_size

    expected = {
        (region, row_of(transfer.targets, token)): (region, row_of(transfer.sources, token))
        for region in range(len(layout.regions))
        for token in range(transfer.tokens)
    }
    assert expected == carried


@given(transfers(), st.randoms(use_true_random=False))
def test_a_complete_list_has_no_fault_in_whatever_order_it_landed(
    transfer: Transfer, order: Random
) -> None:
    runs = announced(transfer)
    order.shuffle(runs)

    assert "" == fault(transfer, runs)


@given(transfers(), st.data())
def test_a_run_that_is_lost_or_doubled_is_found(transfer: Transfer, data: st.DataObject) -> None:
    runs = announced(transfer)
    at = data.draw(st.integers(0, len(runs) - 1))

    assert "" != fault(transfer, runs[:at] + runs[at + 1 :])
    assert "" != fault(transfer, [*runs, runs[at]])
    doubled = msgspec.structs.replace(runs[at], index=len(runs))
    assert "" != fault(transfer, [doubled, *runs])


@settings(max_examples=300)
@given(transfers(), st.data())
def test_a_run_that_is_altered_is_found(transfer: Transfer, data: st.DataObject) -> None:
    runs = announced(transfer)
    at = data.draw(st.integers(0, len(runs) - 1))
    field = data.draw(st.sampled_from(["region", "first_page", "pages", "nbytes"]))
    value = data.draw(st.integers(-3, 60) | st.integers(-(1 << 62), 1 << 62))
    assume(value != getattr(runs[at], field))
    runs[at] = msgspec.structs.replace(runs[at], **{field: value})

    assert "" != fault(transfer, runs)
