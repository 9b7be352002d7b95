"""What the shapes of all APIs share: the frame of an event stream, usage, and the shape's face."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import msgspec

from pdcluster_engine.http.sequences import Sequence
from pdcluster_engine.http.tokens import TokenNames
from pdcluster_engine.submission import Output
from pdcluster_protocol.requests import ParsedRequest

DONE = b"data: [DONE]\n\n"
LOGPROB_MIN = -9999.0
"""OpenAI's word for "impossible": JSON has no minus infinity."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Reply(msgspec.Struct, frozen=True):
    """All that an answer is made of."""

    id: str
    created: int
    """Unix seconds."""
    parsed: ParsedRequest
    sequences: SequenceOf[Sequence]
    names: TokenNames

    def usage(self) -> Usage:
        """The counts as they stand now."""
        firsts = {sequence.prompt_index: sequence for sequence in self.sequences}
        prompt = sum(len(sequence.submission.token_ids) for sequence in firsts.values())
        completion = sum(len(sequence.outputs) for sequence in self.sequences)
        return Usage(prompt, completion, prompt + completion)


Fresh = tuple[Sequence, Output]
"""One new output; it already stands in its sequence's `outputs`."""


class Shape(Protocol):
    """One API's words for an answer."""

    def events(self, fresh: SequenceOf[Fresh]) -> bytes:
        """Server-sent events for outputs that are new, in order."""

    def ending(self) -> bytes:
        """The events behind the last output of a good stream."""

    def whole(self) -> bytes:
        """The answer without a stream, once every sequence has ended well."""


def frame(events: Iterable[object]) -> bytes:
    """Server-sent events of JSON values."""
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)


def finite(logprob: float) -> float:
    """A logprob that JSON can carry; all but minus infinity stay exact."""
    return max(logprob, LOGPROB_MIN)
