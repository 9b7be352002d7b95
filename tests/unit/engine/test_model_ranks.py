"""One model over the arenas of several ranks: the same logits, and every rank's bytes matter."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pdcluster_engine.model.port import DecodeRow, RankArena
from pdcluster_protocol.rank_layout import kv_facts
from pdcluster_protocol.rank_mapping import RankMapping, RowSpread
from pdcluster_protocol.segments import row_slices, segments, sent_pages
from pdcluster_protocol.topology import Parallelism
from support.model_runs import MODELS, PAGE_COUNT, PagedModel, coordinates, place
from support.prompts import prompt

LENGTH = 130
TOKENS = 4
PLACES = [
    Parallelism(tp=2),
    Parallelism(tp=4),
    Parallelism(pp=2),
    Parallelism(tp=2, pp=2),
    Parallelism(tp=2, cp=2),
    Parallelism(tp=4, cp=2, pp=2),
]
EACH_PLACE = pytest.mark.parametrize(
    "parallel", PLACES, ids=lambda p: f"tp{p.attention_tp}-pp{p.pp}-cp{p.cp}"
)
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


def zero(model: PagedModel, rank: int, region: int, pages: list[int]) -> dict[int, bytes]:
    """Take a region of a rank back to memory that no transfer reached; returns what lay there."""
    lost = {}
    for page in pages:
        rows = model.page_bytes(region, page, rank=rank)
        lost[page] = bytes(rows)
        rows[:] = bytes(len(rows))
    return lost


@EACH_MODEL
@EACH_PLACE
def test_logits_over_any_ranks_are_those_over_one_arena(name: str, parallel: Parallelism) -> None:
    whole, parted = PagedModel(name, seed=1), PagedModel(name, seed=2, parallel=parallel)
    assert parallel.ranks_per_dp == len(parted.placements)
    ids = prompt(LENGTH)
    seen = []
    for model in (whole, parted):
        pages = model.take(LENGTH + TOKENS)
        first = model.prefill(pages, ids, chunk=50)
        seen.append(torch.stack(model.decode(pages, LENGTH, first, tokens=TOKENS)))
    assert torch.equal(*seen)


@EACH_MODEL
@EACH_PLACE
def test_a_batch_over_any_ranks_has_the_logits_of_one_arena(
    name: str, parallel: Parallelism
) -> None:
    seen = []
    for model in (PagedModel(name), PagedModel(name, parallel=parallel)):
        rows = []
        for length in (3, 64, 100):
            pages = model.take(length + 1)
            first = model.prefill(pages, prompt(length), chunk=64)
            rows.append(DecodeRow(pages, length, int(first.argmax())))
        model.runner.mode = type(model.runner.mode)("batched")
        seen.append(model.runner.decode(rows))
    assert torch.equal(*seen)


@EACH_MODEL
@EACH_PLACE
def test_decode_reads_the_bytes_of_every_single_rank(name: str, parallel: Parallelism) -> None:
    """Whatever a transfer leaves undone in one rank's arena shows in the logits."""
    model = PagedModel(name, parallel=parallel)
    pages = model.take(LENGTH + 1)
    first = model.prefill(pages, prompt(LENGTH), chunk=64)
    row = DecodeRow(pages, LENGTH, int(first.argmax()))
    expected = model.runner.decode([row])
    for rank, placement in enumerate(model.placements):
        for index, region in enumerate(placement.slice.layout.regions):
            lost = zero(model, rank, index, pages)
            spoilt = not torch.equal(expected, model.runner.decode([row]))
            for page, rows in lost.items():
                model.page_bytes(index, page, rank=rank)[:] = rows
            assert spoilt, f"{region.name} of rank {rank}"
    assert torch.equal(expected, model.runner.decode([row]))


@EACH_MODEL
def test_each_tensor_rank_holds_its_heads_of_the_whole_rows(name: str) -> None:
    whole, parted = PagedModel(name), PagedModel(name, parallel=Parallelism(tp=2))
    ids = prompt(70)
    pages = whole.take(70)
    for model in (whole, parted):
        model.prefill(pages, ids, chunk=64)
    for index, region in enumerate(whole.layout.regions):
        row = region.bytes_per_token
        expected = bytes(whole.page_bytes(index, pages[0])[:row])
        held = [
            bytes(parted.page_bytes(index, pages[0], rank=rank)[: row // min(2, region.heads)])
            for rank in range(2)
        ]
        assert (expected if region.heads > 1 else 2 * expected) == b"".join(held), region.name


def move_mapped(
    mapping: RankMapping,
    source: PagedModel,
    here: list[int],
    target: PagedModel,
    there: list[int],
) -> None:
    """Copy what the protocol's rules send from each rank of prefill to each of decode."""
    senders, receivers = coordinates(mapping.prefill), coordinates(mapping.decode)
    layout = source.layout
    count = layout.pages_for(LENGTH)
    for one, other in product(range(len(senders)), range(len(receivers))):
        slices = row_slices(mapping, layout, source=senders[one], destination=receivers[other])
        pages = sent_pages(mapping, senders[one], sources=here[:count], targets=there[:count])
        for part in segments(slices, pages, tokens=LENGTH, page_size=layout.page_size):
            begin = source.page_offset(part.source_region, part.source_page, rank=one)
            end = target.page_offset(part.region, part.page, rank=other)
            begin, end = begin + part.source_offset, end + part.offset
            rows = source.arena_bytes(one)[begin : begin + part.nbytes]
            target.arena_bytes(other)[end : end + part.nbytes] = rows


@pytest.mark.parametrize("name", ["tiny-glm", "tiny-qwen"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Parallelism(), Parallelism(tp=2)),
        (Parallelism(tp=2), Parallelism()),
        (Parallelism(tp=4), Parallelism(tp=2)),
        (Parallelism(tp=2), Parallelism(tp=4)),
        (Parallelism(tp=8), Parallelism(tp=4)),
        (Parallelism(pp=2), Parallelism()),
        (Parallelism(tp=2, pp=2), Parallelism(tp=2, pp=2)),
        (Parallelism(tp=2, cp=2), Parallelism()),
        (Parallelism(tp=4, cp=2, pp=3), Parallelism(tp=4)),
    ],
    ids=lambda p: f"tp{p.attention_tp}-pp{p.pp}-cp{p.cp}",
)
@pytest.mark.parametrize("spread", [RowSpread.FIRST_CP_RANK, RowSpread.PAGE_RANGES])
def test_decode_has_the_logits_of_one_arena_after_what_the_mapping_sends(
    name: str, prefill: Parallelism, decode: Parallelism, spread: RowSpread
) -> None:
    source, target = PagedModel(name, parallel=prefill), PagedModel(name, seed=1, parallel=decode)
    whole = PagedModel(name, seed=2)
    mapping = RankMapping(prefill, decode, kv_facts(whole.layout, spread=spread))
    here, there, alone = (model.take(LENGTH + TOKENS) for model in (source, target, whole))
    first = source.prefill(here, prompt(LENGTH), chunk=64)
    assert torch.equal(first, whole.prefill(alone, prompt(LENGTH), chunk=64))
    move_mapped(mapping, source, here, target, there)
    expected = whole.decode(alone, LENGTH, first, tokens=TOKENS)
    seen = target.decode(there, LENGTH, first, tokens=TOKENS)
    assert torch.equal(torch.stack(expected), torch.stack(seen))


def test_rows_are_announced_by_the_regions_of_the_whole_model() -> None:
    model = PagedModel("tiny-llama", parallel=Parallelism(tp=2, pp=2))
    announced: list[tuple[int, int, int]] = []
    model.prefill(
        model.take(70), prompt(70), chunk=64, written=lambda *rows: announced.append(rows)
    )
    regions = range(len(model.layout.regions))
    assert [(r, 0, 64) for r in regions] + [(r, 64, 70) for r in regions] == announced


@pytest.mark.parametrize("missing", [0, 1])
def test_ranks_that_do_not_hold_the_whole_model_are_refused_by_the_region(missing: int) -> None:
    model = PagedModel("tiny-llama")

    def without(parallel: Parallelism) -> list[RankArena]:
        placements = place(model.layout, parallel)
        del placements[missing]
        return placements

    stage = model.layout.regions[2 * missing].name
    with pytest.raises(
        ValueError, match=rf"region {stage} has heads \[0, 2\); the ranks hold none"
    ):
        model.runner.attach(without(Parallelism(pp=2)), PAGE_COUNT)
    held = rf"the ranks hold \[{1 - missing}, {2 - missing}\)"
    with pytest.raises(ValueError, match=rf"region 0.key has heads \[0, 2\); {held}"):
        model.runner.attach(without(Parallelism(tp=2)), PAGE_COUNT)
