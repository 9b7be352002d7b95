"""One client request from its body to its end: cut into sequences, answered once."""

from __future__ import annotations

import secrets
import time
from typing import Final, NamedTuple

import msgspec

from pdcluster_protocol.config import RouterConfig
from pdcluster_protocol.errors import InvalidRequest, Overloaded, Reason
from pdcluster_protocol.pair import Cause, PairClocks
from pdcluster_protocol.requests import Api, ParsedRequest, RequestLimits, check_prompt_length
from pdcluster_sidecar.router.bodies import LegBodies, SequenceFields
from pdcluster_sidecar.router.exchange import Exchange
from pdcluster_sidecar.router.merge import MergedAnswer, MergedStream
from pdcluster_sidecar.router.relays import MergingRelay, SingleRelay
from pdcluster_sidecar.router.replies import Failure, header_value
from pdcluster_sidecar.router.sequence import Sequence, Sink, Surroundings, Work
from pdcluster_sidecar.router.telemetry import Outcome
from pdcluster_sidecar.router.tokens import Codec

PAGE_TOKENS: Final = 64
"""For the estimate of a sequence's pages; the engines count their own."""
SEED_COUNT: Final = 1 << 64


class ClientRequest:
    """One client's request, from its body to its end."""

    __slots__ = (
        "_config",
        "_exchange",
        "_limits",
        "_sequences",
        "_shared",
        "_started_at",
        "api",
        "ended",
        "parsed",
        "rid",
    )

    def __init__(
        self,
        exchange: Exchange,
        api: Api,
        *,
        config: RouterConfig,
        limits: RequestLimits,
        shared: Surroundings,
    ) -> None:
        self._exchange = exchange
        self._config = config
        self._limits = limits
        self._shared = shared
        self._sequences: list[Sequence] = []
        self._started_at = time.monotonic()
        self.api = api
        self.rid = f"pd-{secrets.token_hex(16)}"
        self.parsed: ParsedRequest | None = None
        self.ended = False
        exchange.on_gone = self._client_gone

    def identity(self) -> tuple[tuple[bytes, bytes], ...]:
        """Our id, and the client's own as an echo; it names nothing here."""
        headers: tuple[tuple[bytes, bytes], ...] = ((b"x-request-id", self.rid.encode()),)
        theirs = self._exchange.headers.get(b"x-request-id")
        if theirs and (value := header_value(theirs.decode("latin-1"))):
            headers += ((b"x-client-request-id", value),)
        return headers

    def take(self, parsed: ParsedRequest) -> None:
        """The request was understood."""
        self.parsed = parsed
        self._exchange.body = b""
        if len(parsed.rids) == 1 and (value := header_value(parsed.rids[0])):
            ours = self._exchange.identity[:1]
            self._exchange.identity = (*ours, (b"x-client-request-id", value))

    def start(self, ids: list[list[int]], codec: Codec | None) -> None:
        """Check the lengths, make the sequences, line them up.

        Raises:
            InvalidRequest: a prompt is too long, or holds an id that the model does not have.
            Overloaded: the queue cannot take all sequences.
        """
        parsed = self.parsed
        if parsed is None:
            return
        outputs = [check_prompt_length(len(prompt), parsed, self._limits) for prompt in ids]
        if codec is not None:
            _check_vocabulary(parsed, codec.vocab_size)
        if not self._shared.admission.takes(parsed.sequence_count):
            raise Overloaded("the router's queue is full; try again later")
        self._cut(parsed, ids, outputs, digest=None if codec is None else codec.digest)
        self._exchange.on_pressure = self._press
        for sequence in tuple(self._sequences):
            if not self.ended:
                sequence.start()
        if self._exchange.pressed:
            self._press(pressed=True)

    def refuse(self, failure: Failure) -> None:
        """Answer with an error of our own; nothing was started."""
        if self.ended:
            return
        if failure.status in {429, 503}:
            failure = msgspec.structs.replace(failure, retry_after_seconds=1)
        self._end(Outcome.REFUSED, failure.reason, failure.message)
        self._exchange.fail(failure)

    def _cut(
        self, parsed: ParsedRequest, ids: list[list[int]], outputs: list[int], *, digest: str | None
    ) -> None:
        """Make one sequence of every sample of every prompt."""
        sinks = self._sinks(parsed)
        bodies = LegBodies(parsed)
        seed = int.from_bytes(secrets.token_bytes(4)) >> 1 if parsed.seed is None else parsed.seed
        for prompt, (tokens, output) in enumerate(zip(ids, outputs, strict=True)):
            # Encoded once: both legs of every sample get the same bytes.
            input_ids = msgspec.Raw(msgspec.json.encode(tokens))
            size = WorkSize(len(tokens), output)
            for sample in range(parsed.n):
                index = prompt * parsed.n + sample
                rid = self.rid if len(sinks) == 1 else f"{self.rid}-{index}"
                fields = SequenceFields(
                    rid=rid, input_ids=input_ids, seed=sample_seed(seed, sample)
                )
                work = make_work(
                    self._config, parsed, size, bodies=bodies, fields=fields, digest=digest
                )
                self._sequences.append(Sequence(work, sinks[index], self._shared))

    def _sinks(self, parsed: ParsedRequest) -> list[Sink]:
        count = parsed.sequence_count
        if count == 1 and not (parsed.api is Api.GENERATE and parsed.batched):
            return [SingleRelay(self._exchange, self._concluded)]
        kind = MergedStream if parsed.stream else MergedAnswer
        merged = kind(parsed.api, self.rid, prompt_count=count // parsed.n, n=parsed.n)
        relay = MergingRelay(self._exchange, merged, self._concluded)
        return [relay.part(index) for index in range(count)]

    # --- ends -----------------------------------------------------------------------------------

    def _client_gone(self) -> None:
        if self.ended:
            return
        detail = "the client closed its connection"
        self._end(Outcome.GONE, Reason.CLIENT_GONE, detail)
        for sequence in self._sequences:
            sequence.leave(detail)

    def _concluded(self, cause: Cause | None) -> None:
        if self.ended:
            return
        if cause is None:
            self._end(Outcome.ANSWERED, None, "")
            return
        gone = cause.reason is Reason.CLIENT_GONE
        self._end(Outcome.GONE if gone else Outcome.FAILED, cause.reason, cause.detail, cause=cause)
        for sequence in self._sequences:
            if not sequence.pair.ended:
                sequence.leave("another sequence of the request failed", reason=Reason.ABORTED)

    def _end(
        self, outcome: Outcome, reason: Reason | None, detail: str, *, cause: Cause | None = None
    ) -> None:
        """The one end of the request, counted and logged once."""
        self.ended = True
        self._shared.metrics.ended(outcome, reason)
        trail = [each for sequence in self._sequences for each in sequence.trail]
        last = trail[-1] if len(self._sequences) == 1 and trail else None
        self._shared.log.info(
            "concluded",
            rid=self.rid,
            room=last and last.key.room,
            attempt=last and last.key.attempt,
            prefill=last and last.prefill,
            decode=last and last.decode,
            path=self.api,
            outcome=outcome,
            reason=reason,
            leg=cause and cause.role,
            detail=detail,
            sequences=len(self._sequences),
            tries=len(trail),
            seconds=round(time.monotonic() - self._started_at, 4),
        )

    def _press(self, pressed: bool) -> None:  # noqa: FBT001  A callback has no names.
        for sequence in self._sequences:
            sequence.press(pressed=pressed)


def sample_seed(seed: int, sample: int) -> int:
    """Sample i uses seed + i; behind the greatest seed comes 0."""
    return (seed + sample) % SEED_COUNT if seed >= 0 else seed + sample


class WorkSize(NamedTuple):
    """Tokens of one sequence."""

    prompt_tokens: int
    output_tokens: int
    """The most that it may produce."""


def make_work(
    config: RouterConfig,
    parsed: ParsedRequest,
    size: WorkSize,
    *,
    bodies: LegBodies,
    fields: SequenceFields,
    digest: str | None = None,
) -> Work:
    """One sequence's work with its clocks.

    The engines' own clocks name their causes better, so the router's are longer than the sum of
    theirs. A plain answer shows no progress: each of its tokens may take as long as a stall.
    """
    timeouts = config.timeouts
    stall = timeouts.stall_seconds
    # What the transfer may take in all: a base, and a share that grows with the prompt.
    share = size.prompt_tokens / config.max_context
    budget = min(timeouts.transfer_seconds, stall + timeouts.transfer_seconds * share)
    unseen_tokens = 0 if parsed.stream else size.output_tokens
    return Work(
        path=parsed.api,
        stream=parsed.stream,
        bodies=bodies,
        fields=fields,
        clocks=PairClocks(
            queue_seconds=timeouts.queue_seconds,
            answer_seconds=timeouts.bootstrap_seconds + budget + stall * (1 + unseen_tokens),
            stall_seconds=stall,
        ),
        budget_seconds=budget,
        pages_needed=-(-(size.prompt_tokens + size.output_tokens) // PAGE_TOKENS),
        digest=digest,
    )


def _check_vocabulary(parsed: ParsedRequest, vocab_size: int) -> None:
    for prompt in parsed.prompts:
        if not isinstance(prompt, str) and max(prompt) >= vocab_size:
            raise InvalidRequest(
                f"the prompt holds the token id {max(prompt)}; ids must be in"
                f" [0, {vocab_size - 1}]",
                field="input_ids" if "input_ids" in parsed.raw else "prompt",
            )
