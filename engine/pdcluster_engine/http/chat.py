"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Literal

import msgspec

from pdcluster_engine.http.sequences import Sequence
from pdcluster_engine.http.shapes import DONE, Fresh, Reply, Usage, finite, frame
from pdcluster_engine.submission import FinishReason, Output


class Alternative(msgspec.Struct, frozen=True):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token beside its alternatives."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: list[Alternative]


class Logprobs(msgspec.Struct, frozen=True):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class Message(msgspec.Struct, frozen=True):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    """One whole sequence."""

    index: int
    message: Message
    logprobs: Logprobs | None
    finish_reason: FinishReason


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of the message."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one sequence."""

    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer without a stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ChatShape:
    """Builds chat completions from a reply."""

    __slots__ = ("_begun", "_reply", "_usage_asked", "_with_logprobs")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._with_logprobs = reply.parsed.sampling.logprobs is not None
        self._usage_asked = reply.parsed.include_usage
        self._begun: set[int] = set()

    def events(self, fresh: SequenceOf[Fresh]) -> bytes:
        chunks: list[ChatChunk] = []
        for sequence, output in fresh:
            if sequence.index not in self._begun:
                self._begun.add(sequence.index)
                role = Delta(role="assistant", content="")
                chunks.append(self._chunk(ChunkChoice(sequence.index, role, None, None)))
            chunks.append(
                self._chunk(
                    ChunkChoice(
                        index=sequence.index,
                        delta=Delta(content=output.text),
                        logprobs=self._logprobs([output]),
                        finish_reason=output.finish,
                    )
                )
            )
        return frame(chunks)

    def ending(self) -> bytes:
        if not self._usage_asked:
            return DONE
        last = msgspec.structs.replace(self._chunk(), usage=self._reply.usage())
        return frame([last]) + DONE

    def whole(self) -> bytes:
        return msgspec.json.encode(
            ChatCompletion(
                id=self._reply.id,
                object="chat.completion",
                created=self._reply.created,
                model=self._reply.parsed.model,
                choices=[self._choice(sequence) for sequence in self._reply.sequences],
                usage=self._reply.usage(),
            )
        )

    def _choice(self, sequence: Sequence) -> Choice:
        return Choice(
            index=sequence.index,
            message=Message("assistant", sequence.text),
            logprobs=self._logprobs(sequence.outputs),
            finish_reason=sequence.finish,
        )

    def _chunk(self, *choices: ChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self._reply.id,
            object="chat.completion.chunk",
            created=self._reply.created,
            model=self._reply.parsed.model,
            choices=list(choices),
            usage=None if self._usage_asked else msgspec.UNSET,
        )

    def _logprobs(self, outputs: list[Output]) -> Logprobs | None:
        if not self._with_logprobs:
            return None
        return Logprobs([self._token(output) for output in outputs])

    def _token(self, output: Output) -> TokenLogprob:
        name = self._reply.names.name
        chosen = name(output.token_id)
        return TokenLogprob(
            token=chosen.text,
            logprob=finite(output.logprob),
            bytes=chosen.raw,
            top_logprobs=[
                Alternative(name(token_id).text, finite(logprob), name(token_id).raw)
                for token_id, logprob in output.top_logprobs
            ],
        )
