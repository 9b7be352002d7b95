"""A request that was understood: the values that parsing yields."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdcluster_protocol.requests.legs import LegFields


class Api(StrEnum):
    """The paths that compute; their shapes differ, their meaning does not."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    GENERATE = "/generate"


class RequestLimits(msgspec.Struct, frozen=True):
    """What this cluster serves, and how much of it one request may ask for."""

    served_name: str
    max_context: int
    """Prompt and output tokens of one sequence together."""
    n_max: int = 128
    batch_max: int = 256
    """Sequences of one request: prompts times `n`."""
    logprobs_max: int = 20
    vocab_size: int | None = None
    """Known: a prompt of token ids is checked against it."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when a sequence ends; the defaults change nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """How many alternatives a token's log probability comes with; None: no log probabilities."""


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One client request, checked.

    Exactly one of `prompts` and `messages` is filled.
    """

    api: Api
    raw: dict[str, msgspec.Raw]
    """The body as it came, doubled keys resolved: what a router rewrites into legs."""
    model: str
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Text or token ids."""
    messages: tuple[dict[str, str], ...] | None = None
    """Chat: `role`, `content` (text parts joined) and, if given, `name`."""
    batched: bool = False
    """The prompt came as a list: `/generate` then answers with a list."""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    """As the client gave it; `check_prompt_length` resolves the default."""
    seed: int | None = None
    rids: tuple[str, ...] = ()
    """The client's own names: none, one, or one per prompt."""
    sampling: Sampling = Sampling()
    leg: LegFields | None = None
    """None: no field names another engine."""

    @property
    def sequence_count(self) -> int:
        """Every prompt `n` times; sequence i belongs to prompt i // n."""
        return max(1, len(self.prompts)) * self.n
