"""From a parsed request to the sequences that the engine computes: ids, keys, addresses, seeds."""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial

import msgspec

from pdcluster_engine.http.dp_ranks import dp_rank_of
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.submission import FinishReason, Output, Submission
from pdcluster_engine.text import TextCodec
from pdcluster_protocol.config import SIDECAR_HTTP_PORT, EngineConfig
from pdcluster_protocol.errors import InvalidRequest
from pdcluster_protocol.ids import Key, RankAddress, Role, mint_attempt, mint_room
from pdcluster_protocol.requests import (
    ParsedRequest,
    RequestLimits,
    check_prompt_length,
    encode_bounded,
)

INLINE_CHARACTERS_MAX = 4096
"""A longer prompt is tokenised on a worker thread; the loop goes on serving."""
ROOM_BITS = 63
ATTEMPT_UNKNOWN = 0
SEED_BITS = 62
SEED_MASK = (1 << 64) - 1


class Sequence:
    """One sequence of a request and what came of it so far."""

    __slots__ = ("ended", "index", "outputs", "prompt_index", "submission")

    def __init__(self, index: int, prompt_index: int, submission: Submission) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.submission = submission
        self.outputs: list[Output] = []
        self.ended = False

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(output.text for output in self.outputs)

    @property
    def finish(self) -> FinishReason:
        """Why it ended: a prefill's leg has made its one token and says `length`, as SGLang's."""
        last = self.outputs[-1].finish if self.outputs else None
        return last or FinishReason.LENGTH


class SequenceFactory:
    """Makes the sequences of a request for one engine."""

    __slots__ = ("_codec", "_config", "_limits")

    def __init__(self, codec: TextCodec, config: EngineConfig, limits: RequestLimits) -> None:
        self._codec = codec
        self._config = config
        self._limits = limits

    async def make(self, parsed: ParsedRequest) -> list[Sequence]:
        """Every prompt `n` times, prompt by prompt; the request has at least one rid.

        Raises:
            InvalidRequest: a prompt does not fit, or a leg's field is missing.
            RankConflict: the leg names a DP rank that is none.
        """
        prompts = await self._token_ids(parsed)
        seed = secrets.randbits(SEED_BITS) if parsed.seed is None else parsed.seed
        rids = _sequence_rids(parsed)
        sequences: list[Sequence] = []
        for prompt_index, token_ids in enumerate(prompts):
            output_tokens_max = check_prompt_length(len(token_ids), parsed, self._limits)
            for sample in range(parsed.n):
                index = len(sequences)
                alone = Submission(
                    key=mint_key(),
                    rid=rids[index],
                    token_ids=token_ids,
                    sampling=_sampling(parsed, seed=(seed + sample) & SEED_MASK),
                    output_tokens_max=output_tokens_max,
                    stop_strings=parsed.sampling.stop,
                    stop_token_ids=frozenset(parsed.sampling.stop_token_ids),
                    ignore_eos=parsed.sampling.ignore_eos,
                    skip_special_tokens=parsed.sampling.skip_special_tokens,
                )
                submission = self._leg(parsed, index, alone)
                sequences.append(Sequence(index, prompt_index, submission))
        return sequences

    def _leg(self, parsed: ParsedRequest, index: int, alone: Submission) -> Submission:
        """The submission as a leg, where the request names a partner for this sequence."""
        leg = parsed.leg
        room = None if leg is None else leg.rooms[index]
        rank = dp_rank_of(leg, room, self._config)
        if leg is None or room is None:
            return msgspec.structs.replace(alone, dp_rank=rank)
        host = leg.hosts[index]
        if host is None and self._config.role is Role.DECODE:
            raise InvalidRequest(
                "bootstrap_host is missing; a decode leg must name the prefill's sidecar",
                field="bootstrap_host",
            )
        return msgspec.structs.replace(
            alone,
            key=Key(room, ATTEMPT_UNKNOWN if leg.attempt is None else leg.attempt),
            attempt_known=leg.attempt is not None,
            bootstrap=RankAddress(
                host=(host or self._config.host).strip("[]"),
                port=leg.ports[index] or SIDECAR_HTTP_PORT,
            ),
            prefill_dp_rank=leg.prefill_dp_rank,
            budget_seconds=leg.budget_seconds,
            dp_rank=rank,
        )

    async def _token_ids(self, parsed: ParsedRequest) -> list[tuple[int, ...]]:
        if _characters(parsed) <= INLINE_CHARACTERS_MAX:
            return self._encode(parsed)
        return await asyncio.to_thread(self._encode, parsed)

    def _encode(self, parsed: ParsedRequest) -> list[tuple[int, ...]]:
        if parsed.messages is not None:
            text = self._codec.render_chat(parsed.messages)
            encode = partial(self._codec.encode, add_special_tokens=False)
            return [tuple(encode_bounded(text, encode, self._limits))]
        return [
            tuple(encode_bounded(prompt, self._codec.encode, self._limits))
            if isinstance(prompt, str)
            else prompt
            for prompt in parsed.prompts
        ]


def mint_key() -> Key:
    """A key for a sequence that this engine computes alone."""
    # Wall-clock time on purpose: attempts of all processes are ordered by it.
    milliseconds = time.time_ns() // 1_000_000
    return Key(
        room=mint_room(secrets.randbits(ROOM_BITS), dp_size=1, dp_rank=0),
        attempt=mint_attempt(milliseconds, secrets.randbits(32)),
    )


def _sequence_rids(parsed: ParsedRequest) -> list[str]:
    """A name for every sequence; one name for several gets their index, as SGLang names them."""
    samples = range(parsed.n)
    if len(parsed.rids) > 1:
        if parsed.n == 1:
            return list(parsed.rids)
        return [f"{rid}_{sample}" for rid in parsed.rids for sample in samples]
    if parsed.sequence_count == 1:
        return list(parsed.rids)
    return [f"{parsed.rids[0]}_{index}" for index in range(parsed.sequence_count)]


def _characters(parsed: ParsedRequest) -> int:
    texts = sum(len(prompt) for prompt in parsed.prompts if isinstance(prompt, str))
    return texts + sum(len(message["content"]) for message in parsed.messages or ())


def _sampling(parsed: ParsedRequest, *, seed: int) -> SamplingParameters:
    asked = parsed.sampling
    return SamplingParameters(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        seed=seed,
        logprobs=asked.logprobs,
    )
