"""The engine's logits are the library's own, bit by bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pdcluster_engine.model.builtin import INDEX_TOPK, VOCAB_SIZE
from pdcluster_engine.model.port import DecodeRow
from support.model_runs import MODELS, PAGE_COUNT, PagedModel, generate, move_rows
from support.prompts import prompt

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300)
TOKENS = 12


def unequal(expected: list[torch.Tensor], seen: list[torch.Tensor]) -> list[int]:
    """The steps whose logits differ in any bit; not a number differs from everything."""
    assert len(expected) == len(seen)
    pairs = enumerate(zip(expected, seen, strict=True))
    return [step for step, (a, b) in pairs if not torch.equal(a, b)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [7, 64, 100, 512])
def test_exact_logits_are_those_of_generate_at_the_same_chunk_size(name: str, chunk: int) -> None:
    model = PagedModel(name, seed=chunk)
    for length in LENGTHS:
        ids = prompt(length)
        pages = model.take(length + TOKENS)
        first = model.prefill(pages, ids, chunk=chunk)
        seen = model.decode(pages, length, first, tokens=TOKENS)
        assert [] == unequal(generate(name, ids, chunk=chunk, tokens=TOKENS), seen), length


@pytest.mark.parametrize("name", MODELS)
def test_rows_moved_as_bytes_to_other_pages_of_another_arena_give_the_same_logits(
    name: str,
) -> None:
    source, target = PagedModel(name, seed=1), PagedModel(name, seed=2)
    for length in LENGTHS:
        ids = prompt(length, seed=3)
        source_pages, target_pages = source.take(length), target.take(length + TOKENS)
        assert source_pages != target_pages
        first = source.prefill(source_pages, ids, chunk=100)
        move_rows(source, source_pages, target, target_pages, tokens=length)
        seen = target.decode(target_pages, length, first, tokens=TOKENS)
        assert [] == unequal(generate(name, ids, chunk=100, tokens=TOKENS), seen), length


@pytest.mark.parametrize("name", MODELS)
def test_a_ragged_batch_chooses_the_tokens_of_generate(name: str) -> None:
    model = PagedModel(name, mode="batched", seed=4)
    prompts = [prompt(length, seed=5) for length in LENGTHS]
    pages = [model.take(len(ids) + TOKENS) for ids in prompts]
    tokens = [
        [int(model.prefill(own, ids, chunk=64).argmax())]
        for own, ids in zip(pages, prompts, strict=True)
    ]
    for step in range(TOKENS - 1):
        rows = [
            DecodeRow(own, len(ids) + step, chosen[-1])
            for own, ids, chosen in zip(pages, prompts, tokens, strict=True)
        ]
        logits = model.runner.decode(rows)
        assert (len(rows), model.runner.vocab_size) == logits.shape
        assert torch.float32 == logits.dtype
        for chosen, row in zip(tokens, logits, strict=True):
            chosen.append(int(row.argmax()))
    for ids, chosen in zip(prompts, tokens, strict=True):
        expected = generate(name, ids, chunk=None, tokens=TOKENS)
        assert [int(step.argmax()) for step in expected] == chosen, len(ids)


@pytest.mark.parametrize("name", MODELS)
def test_exact_mode_computes_each_row_of_a_batch_as_if_alone(name: str) -> None:
    model = PagedModel(name, seed=6)
    prompts = [prompt(length, seed=7) for length in (5, 64, 130)]
    pages = [model.take(len(ids) + 1) for ids in prompts]
    rows = [
        DecodeRow(own, len(ids), int(model.prefill(own, ids, chunk=64).argmax()))
        for own, ids in zip(pages, prompts, strict=True)
    ]
    together = model.runner.decode(rows)
    alone = [model.runner.decode([row])[0] for row in rows]
    assert [] == unequal(alone, list(together))


@pytest.mark.parametrize("name", MODELS)
def test_every_row_of_every_region_is_announced_exactly_once(name: str) -> None:
    model = PagedModel(name)
    length = 150
    pages = model.take(length)
    announced: Counter[tuple[int, int]] = Counter()

    def written(region: int, start: int, end: int) -> None:
        announced.update((region, token) for token in range(start, end))
        kind = model.layout.regions[region]
        for token in (start, end - 1):
            page, row = divmod(token, model.layout.page_size)
            begin = row * kind.bytes_per_token
            stored = model.page_bytes(region, pages[page])[begin : begin + kind.bytes_per_token]
            assert b"\xff" * kind.bytes_per_token != bytes(stored)

    model.prefill(pages, prompt(length), chunk=64, written=written)
    regions = range(len(model.layout.regions))
    assert Counter({(r, t): 1 for r in regions for t in range(length)}) == announced


@pytest.mark.parametrize("name", MODELS)
def test_announcements_come_while_the_forward_still_computes(name: str) -> None:
    """The first region is announced before the last one is even written."""
    model = PagedModel(name)
    pages = model.take(64)
    last = len(model.layout.regions) - 1
    untouched = bytes(model.page_bytes(last, pages[0]))
    seen: list[tuple[int, bool]] = []

    def written(region: int, _start: int, _end: int) -> None:
        seen.append((region, untouched == bytes(model.page_bytes(last, pages[0]))))

    model.prefill(pages, prompt(64), chunk=64, written=written)
    assert list(range(last + 1)) == [region for region, _ in seen]
    assert (0, True) == seen[0]
    assert (last, False) == seen[-1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["exact", "batched"])
def test_what_lies_in_pages_of_others_and_behind_the_last_row_changes_nothing(
    name: str, mode: str
) -> None:
    """The arena of a `PagedModel` begins as NaN in every row, also in those that pad a batch."""
    model = PagedModel(name, mode=mode, seed=8)
    pages = [model.take(3), model.take(130)]
    ids = [prompt(2, seed=9), prompt(129, seed=9)]
    first = [model.prefill(p, i, chunk=64) for p, i in zip(pages, ids, strict=True)]
    rows = [
        DecodeRow(p, len(i), int(f.argmax())) for p, i, f in zip(pages, ids, first, strict=True)
    ]
    with_rubbish = model.runner.decode(rows)
    assert bool(torch.isfinite(with_rubbish).all())
    for page in range(PAGE_COUNT):
        if page not in {*pages[0], *pages[1]}:
            for region in range(len(model.layout.regions)):
                item = model.layout.item_bytes(region)
                model.page_bytes(region, page)[:] = b"\x00" * item
    assert bool(torch.equal(with_rubbish, model.runner.decode(rows)))


def test_the_indexer_of_tiny_glm_selects_without_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among equal scores the choice depends on shapes, and chunked and whole runs would differ."""
    selections, ties = 0, 0
    plain = torch.Tensor.topk

    def counting(scores: torch.Tensor, k: int, *args: object, **kwargs: object) -> object:
        nonlocal selections, ties
        if k == INDEX_TOPK and scores.shape[-1] > INDEX_TOPK:
            edge = plain(scores, k + 1, dim=-1).values[..., -2:]
            real = edge[..., 1] != -torch.inf
            selections += int(real.sum())
            ties += int((real & (edge[..., 0] == edge[..., 1])).sum())
        return plain(scores, k, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", counting)
    model = PagedModel("tiny-glm")
    of_every_token = [*range(VOCAB_SIZE), *prompt(300 - VOCAB_SIZE, seed=2)]
    for ids in (prompt(300, seed=0), prompt(300, seed=1), of_every_token):
        model.prefill(model.take(300), ids, chunk=300)
    assert 2 * 3 * (300 - INDEX_TOPK) == selections
    assert 0 == ties


def test_a_chunk_that_pages_or_tokens_do_not_cover_is_refused() -> None:
    model = PagedModel("tiny-llama")
    with pytest.raises(ValueError, match="1 pages of 64 cannot hold 65 tokens"):
        model.runner.prefill(model.take(64), prompt(65), 0, 65, lambda *_: None)
    with pytest.raises(ValueError, match=r"chunk \[3, 3\) of 5 tokens"):
        model.runner.prefill(model.take(5), prompt(5), 3, 3, lambda *_: None)
    with pytest.raises(ValueError, match="at least one row"):
        model.runner.decode([])
