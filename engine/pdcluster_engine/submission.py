"""One sequence between the HTTP side and the engine's threads.

The HTTP side makes a `Submission` of a validated request and hands it to `Engine.submit` with an
`OutputSink`. Tokens, text and the end come back through the sink, called from the model or the
owner thread; the sink must not block (the HTTP side posts into its event loop).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from pdcluster_engine.sampling import SamplingParameters
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import Load


class FinishReason(StrEnum):
    """Why a sequence ended well, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, validated: what the model and the protocol need to know."""

    key: Key
    rid: str
    token_ids: tuple[int, ...]
    sampling: SamplingParameters
    output_tokens_max: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bootstrap: RankAddress | None = None
    """None: computed by this engine alone."""
    prefill_dp_rank: int | None = None
    budget_seconds: float | None = None
    attempt_known: bool = True
    dp_rank: int | None = None
    """The rank of this instance that computes it; None: whoever was asked."""

    @property
    def leg(self) -> str:
        """What it is here, for logs."""
        return "alone" if self.bootstrap is None else "pair"


class Output(msgspec.Struct, frozen=True):
    """One token of a sequence, with the text that may be shown now (maybe empty)."""

    token_id: int
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    finish: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or token id that ended it."""


class OutputSink(Protocol):
    """Where a sequence's outputs go; exactly one of `finished` and `failed` is called, last."""

    def emit(self, output: Output) -> None:
        """One token; the last one of a good end has `finish` set."""

    def finished(self) -> None:
        """The leg ended well: decode's last token is out, or prefill's pages have been taken."""

    def failed(self, reason: Reason, detail: str) -> None:
        """The leg ended badly."""


class EngineState(msgspec.Struct, frozen=True):
    """For `/health`, `/server_info`, `/v1/loads` and response headers."""

    ready: bool
    joined: bool
    loops: int
    load: Load
    incarnation: str


class Engine(Protocol):
    """What the HTTP side sees of the loop; every method may be called from any thread."""

    def submit(self, submission: Submission, sink: OutputSink) -> None:
        """Take a sequence.

        Raises:
            Overloaded, RequestFailed: refused at once (`RoomInUse`, `RidInUse`, `ShuttingDown`);
            nothing will reach the sink.
        """

    def cancel(self, key: Key, reason: Reason, detail: str = "") -> None:
        """End a sequence; unknown keys cancel nothing."""

    def cancel_rid(self, rid: str, reason: Reason) -> bool:
        """End the one live sequence with exactly this rid; False when there is none."""

    def state(self) -> EngineState:
        """A snapshot."""
