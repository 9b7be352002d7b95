"""SGLang's `/generate`: ids beside text, and a stream whose every event repeats all so far."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec

from pdcluster_engine.http.sequences import Sequence
from pdcluster_engine.http.shapes import DONE, Fresh, Reply, finite, frame
from pdcluster_engine.submission import FinishReason, Output

LogprobRow = tuple[float, int, None]
"""Logprob, token id, and no text: SGLang's place for text that was not asked for."""


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """SGLang's `meta_info`."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[LogprobRow] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[LogprobRow] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[LogprobRow]] | msgspec.UnsetType = msgspec.UNSET


class Generated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence, as far as it has come."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET


class GenerateShape:
    """Builds `/generate` answers; text and ids grow along with the stream."""

    __slots__ = ("_ids", "_many", "_reply", "_texts")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._many = reply.parsed.batched or len(reply.sequences) > 1
        self._texts = [""] * len(reply.sequences)
        self._ids: list[list[int]] = [[] for _ in reply.sequences]

    def events(self, fresh: SequenceOf[Fresh]) -> bytes:
        # Each event holds all so far, so only the newest of a sequence says anything.
        grown: dict[int, Sequence] = {}
        for sequence, output in fresh:
            self._texts[sequence.index] += output.text
            self._ids[sequence.index].append(output.token_id)
            grown[sequence.index] = sequence
        return frame(
            self._generated(sequence, finish=sequence.outputs[-1].finish)
            for sequence in grown.values()
        )

    def ending(self) -> bytes:
        return DONE

    def whole(self) -> bytes:
        for sequence in self._reply.sequences:
            self._texts[sequence.index] = sequence.text
            self._ids[sequence.index] = [output.token_id for output in sequence.outputs]
        answers = [
            self._generated(sequence, finish=sequence.finish) for sequence in self._reply.sequences
        ]
        return msgspec.json.encode(answers if self._many else answers[0])

    def _generated(self, sequence: Sequence, *, finish: FinishReason | None) -> Generated:
        return Generated(
            text=self._texts[sequence.index],
            output_ids=self._ids[sequence.index],
            meta_info=self._meta(sequence, finish),
            index=sequence.index if self._many else msgspec.UNSET,
        )

    def _meta(self, sequence: Sequence, finish: FinishReason | None) -> MetaInfo:
        outputs = sequence.outputs
        meta = MetaInfo(
            id=sequence.submission.rid,
            finish_reason=_finish_reason(outputs, finish),
            prompt_tokens=len(sequence.submission.token_ids),
            completion_tokens=len(outputs),
            cached_tokens=0,
        )
        alternatives = self._reply.parsed.sampling.logprobs
        if alternatives is None:
            return meta
        return msgspec.structs.replace(
            meta,
            input_token_logprobs=[],
            output_token_logprobs=[
                (finite(output.logprob), output.token_id, None) for output in outputs
            ],
            output_top_logprobs=[_alternatives(output) for output in outputs]
            if alternatives
            else msgspec.UNSET,
        )


def _alternatives(output: Output) -> list[LogprobRow]:
    return [(finite(logprob), token_id, None) for token_id, logprob in output.top_logprobs]


def _finish_reason(outputs: list[Output], finish: FinishReason | None) -> dict[str, Any] | None:
    match finish:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(outputs)}
        case FinishReason.STOP:
            return {"type": "stop", "matched": outputs[-1].stop}
