"""What the library's own `generate` says, in the form in which a client sees it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
import torch

from support.model_runs import generate


class Expected(msgspec.Struct, frozen=True):
    """Greedy tokens and, for each, its top logprobs: (logprob, id), likeliest first."""

    ids: list[int]
    tops: list[list[tuple[float, int]]]


def expected(
    model: str, ids: Sequence[int], tokens: int, *, chunk: int | None, tops: int
) -> Expected:
    """The oracle's answer, computed once for the same question."""
    return _expected(model, tuple(ids), tokens, chunk, tops)


@functools.cache
def _expected(
    model: str, ids: tuple[int, ...], tokens: int, chunk: int | None, tops: int
) -> Expected:
    logits = generate(model, ids, chunk=chunk, tokens=tokens)
    return Expected(
        [int(step.argmax()) for step in logits], [_top_logprobs(step, tops) for step in logits]
    )


def _top_logprobs(logits: torch.Tensor, count: int) -> list[tuple[float, int]]:
    values, ids = torch.topk(torch.log_softmax(logits.float(), dim=-1), count)
    return list(zip(values.tolist(), ids.tolist(), strict=True))
