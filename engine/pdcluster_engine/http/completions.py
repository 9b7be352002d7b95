"""OpenAI's `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

import msgspec

from pdcluster_engine.http.shapes import DONE, Fresh, Reply, Usage, finite, frame
from pdcluster_engine.submission import FinishReason, Output


class Logprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(msgspec.Struct, frozen=True):
    """One sequence, or a piece of it."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer, and every event of a stream; they share one shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionShape:
    """Builds completions from a reply."""

    __slots__ = ("_offsets", "_reply", "_usage_asked", "_with_logprobs")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._with_logprobs = reply.parsed.sampling.logprobs is not None
        self._usage_asked = reply.parsed.include_usage
        self._offsets = [0] * len(reply.sequences)

    def events(self, fresh: SequenceOf[Fresh]) -> bytes:
        usage = None if self._usage_asked else msgspec.UNSET
        return frame(
            self._completion([self._choice(sequence.index, [output])], usage)
            for sequence, output in fresh
        )

    def ending(self) -> bytes:
        if not self._usage_asked:
            return DONE
        return frame([self._completion([], self._reply.usage())]) + DONE

    def whole(self) -> bytes:
        choices = [
            self._choice(sequence.index, sequence.outputs, finish=sequence.finish)
            for sequence in self._reply.sequences
        ]
        return msgspec.json.encode(self._completion(choices, self._reply.usage()))

    def _completion(
        self, choices: list[Choice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._reply.id,
            object="text_completion",
            created=self._reply.created,
            model=self._reply.parsed.model,
            choices=choices,
            usage=usage,
        )

    def _choice(
        self, index: int, outputs: list[Output], *, finish: FinishReason | None = None
    ) -> Choice:
        return Choice(
            index=index,
            text="".join(output.text for output in outputs),
            logprobs=self._logprobs(index, outputs) if self._with_logprobs else None,
            finish_reason=finish or (outputs[-1].finish if outputs else None),
        )

    def _logprobs(self, index: int, outputs: list[Output]) -> Logprobs:
        name = self._reply.names.name
        offsets: list[int] = []
        for output in outputs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(output.text)
        return Logprobs(
            tokens=[name(output.token_id).text for output in outputs],
            token_logprobs=[finite(output.logprob) for output in outputs],
            top_logprobs=[self._alternatives(output) for output in outputs],
            text_offset=offsets,
        )

    def _alternatives(self, output: Output) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, logprob in output.top_logprobs:
            text = self._reply.names.name(token_id).text
            # Two tokens may look the same; neither may hide the other.
            named[f"token_id:{token_id}" if text in named else text] = finite(logprob)
        return named
