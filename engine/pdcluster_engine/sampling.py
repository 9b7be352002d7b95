"""From logits to a token.

The order is the library's: repetition penalty, presence and frequency penalty, temperature,
top-k, top-p, min-p, one draw. A generator is made for each (seed, position), so a sequence can
change its process between any two tokens with nothing but its seed.

Logprobs are of the model's own distribution, before any of the above.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import msgspec
import torch

from pdcluster_protocol.errors import InvalidRequest, Reason, RequestFailed

GREEDY_BELOW = 1e-5
"""A lower temperature only overflows; it means greedy."""
LOGPROBS_MAX = 128
"""As many as a metadata row can carry."""


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How one sequence chooses its tokens.

    Raises:
        InvalidRequest: naming field, value and range.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output; 1 is none."""
    presence_penalty: float = 0.0
    """Over the output, once per token that occurred."""
    frequency_penalty: float = 0.0
    """Over the output, once per occurrence."""
    seed: int | None = None
    """None counts as 0: whoever takes the request in draws one."""
    logprobs: int | None = None
    """How many top logprobs to report; None: none, not even of the chosen token."""

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, math.isfinite(self.temperature), "finite")
        _require("temperature", self.temperature, self.temperature >= 0, "at least 0")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("top_k", self.top_k, self.top_k >= -1, "-1 (all) or more")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        penalty = self.repetition_penalty
        _require("repetition_penalty", penalty, 0 < penalty <= 10, "in (0, 10]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, -2 <= value <= 2, "in [-2, 2]")
        if self.logprobs is not None:
            allowed = 0 <= self.logprobs <= LOGPROBS_MAX
            _require("logprobs", self.logprobs, allowed, f"in [0, {LOGPROBS_MAX}]")

    @property
    def greedy(self) -> bool:
        """The likeliest token always."""
        return self.temperature < GREEDY_BELOW


class Sampled(msgspec.Struct, frozen=True):
    """One chosen token."""

    token_id: int
    logprob: float
    """Exact float32 of the model's own distribution."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, logprob), likeliest first."""


def sample(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    *,
    history: Sequence[int],
    output: Sequence[int],
    position: int,
) -> Sampled:
    """Choose the token at `position` from float logits `[vocab]`, which stay unchanged.

    `history` is prompt and output so far, `output` the output alone; `position` counts tokens from
    the start of the prompt and makes each draw independent of the others.

    Raises:
        RequestFailed: `ModelFailed`, when the logits have no largest number.
    """
    raw = logits.detach().to("cpu", torch.float32)
    if not bool(torch.isfinite(raw.max())):
        raise RequestFailed(
            f"the model gave no finite logit at position {position}", reason=Reason.MODEL_FAILED
        )
    scores = _penalized(raw, parameters, history=history, output=output)
    if parameters.greedy:
        token_id = int(scores.argmax())
    else:
        token_id = _draw(scores, parameters, position=position)
    logprobs = torch.log_softmax(raw, dim=-1)
    return Sampled(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        top_logprobs=_top(logprobs, parameters.logprobs or 0),
    )


def generator_seed(seed: int | None, position: int) -> int:
    """64 bits that depend on nothing but the two."""
    packed = struct.pack("<QQ", (seed or 0) & 0xFFFF_FFFF_FFFF_FFFF, position)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _draw(scores: torch.Tensor, parameters: SamplingParameters, *, position: int) -> int:
    # A tiny repetition penalty or temperature would else make infinite scores, and those no draw.
    scores = (scores / parameters.temperature).clamp(max=torch.finfo(scores.dtype).max)
    scores = _truncated(scores, parameters)
    generator = torch.Generator()
    generator.manual_seed(generator_seed(parameters.seed, position))
    probabilities = torch.softmax(scores, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _penalized(
    scores: torch.Tensor,
    parameters: SamplingParameters,
    *,
    history: Sequence[int],
    output: Sequence[int],
) -> torch.Tensor:
    penalty = parameters.repetition_penalty
    if penalty != 1 and history:
        seen = torch.tensor(list(set(history)))
        chosen = scores[seen]
        scores = scores.index_copy(
            0, seen, torch.where(chosen < 0, chosen * penalty, chosen / penalty)
        )
    if (parameters.presence_penalty or parameters.frequency_penalty) and output:
        counts = torch.bincount(torch.tensor(list(output)), minlength=len(scores))
        scores = scores - parameters.presence_penalty * (counts > 0)
        scores = scores - parameters.frequency_penalty * counts
    return scores


def _truncated(scores: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Minus infinity where top-k, top-p or min-p forbid a token; the likeliest always stays."""
    if 0 < parameters.top_k < len(scores):
        lowest = torch.topk(scores, parameters.top_k).values[-1]
        scores = scores.masked_fill(scores < lowest, -math.inf)
    if parameters.top_p < 1:
        ascending, order = torch.sort(scores)
        outside = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1 - parameters.top_p
        outside[-1] = False
        scores = scores.index_fill(0, order[outside], -math.inf)
    if parameters.min_p > 0:
        probabilities = torch.softmax(scores, dim=-1)
        least = parameters.min_p * probabilities.max()
        scores = scores.masked_fill(probabilities < least, -math.inf)
    return scores


def _top(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    values, ids = torch.topk(logprobs, min(count, len(logprobs)))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _require(field: str, value: float, allowed: bool, rule: str) -> None:  # noqa: FBT001
    # Positional: the four words read as one sentence at each call.
    if not allowed:
        raise InvalidRequest(f"{field} is {value}; it must be {rule}", field=field)
