"""The model thread: orders in; forwards; events to the owner and outputs to the sinks.

The thread owns the runner and every sequence. Between two forwards it takes all orders, so a stop
takes effect at the next chunk or token. What the model raises about one prompt ends that key; what
it raises about a decode step ends every key of the batch, since nobody can say whose rows did it.
Anything else is a fault of ours and ends the process in its outermost loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import assert_never

import msgspec
import torch

from pdcluster_engine.memory.metadata import MetadataRow, RankMetadata, row_fault
from pdcluster_engine.model.port import ModelRunner, Written
from pdcluster_engine.sampling import Sampled, sample
from pdcluster_engine.scheduling.answer import Answer
from pdcluster_engine.scheduling.orders import Begin, Order, Shutdown, Stop, Work
from pdcluster_engine.scheduling.scheduler import Scheduler
from pdcluster_engine.scheduling.sequence import Sequence
from pdcluster_engine.telemetry import Telemetry
from pdcluster_engine.text import TextCodec
from pdcluster_protocol.errors import PDClusterError, Reason
from pdcluster_protocol.events import (
    ComputeStopped,
    DecodeFinished,
    Event,
    PromptComputed,
    RowsWritten,
)
from pdcluster_protocol.ids import Key

MODEL_FAULTS = (PDClusterError, RuntimeError, ValueError, ArithmeticError, LookupError, MemoryError)
"""What a forward or a draw raises about its input; the rest are programming errors."""
_DETAIL_CHARACTERS_MAX = 500
_IDLE_SECONDS_MAX = 60.0
"""An idle thread looks again now and then, so no lost wake-up can last."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much the model thread takes at a time."""

    chunk_tokens: int
    """Prompt tokens of one forward."""
    sequences_max: int
    """Answers of one decode step."""
    orders_max: int
    """Computations that may wait to be taken."""


class ModelThread:
    """One loop over one runner; `begin`, `stop` and `shut_down` may be called from any thread."""

    def __init__(
        self,
        runner: ModelRunner,
        codec: TextCodec,
        *,
        metadata: RankMetadata,
        post: Callable[[Event], None],
        telemetry: Telemetry,
        bounds: Bounds,
    ) -> None:
        self._runner = runner
        self._codec = codec
        self._metadata = metadata
        self._post = post
        self._telemetry = telemetry
        self._bounds = bounds
        self._scheduler = Scheduler(sequences_max=bounds.sequences_max)
        self._orders: deque[Order] = deque()
        self._arrived = threading.Condition()
        self._ended = False

    @property
    def queued(self) -> int:
        """Sequences that wait for their turn, orders not yet taken among them."""
        return self._scheduler.queued + len(self._orders)

    @property
    def active(self) -> int:
        """Prompts and answers under way."""
        return self._scheduler.active

    def begin(self, order: Begin) -> bool:
        """Hand over a computation without waiting; False when the line is at its bound."""
        with self._arrived:
            if len(self._orders) >= self._bounds.orders_max:
                return False
            self._orders.append(order)
            self._arrived.notify()
        return True

    def stop(self, key: Key) -> None:
        """Ask for a key's pages; always taken, since a key has at most one computation."""
        with self._arrived:
            self._orders.append(Stop(key))
            self._arrived.notify()

    def shut_down(self) -> None:
        """End after the running forward."""
        with self._arrived:
            self._orders.append(Shutdown())
            self._arrived.notify()

    def run(self) -> None:
        """The thread's body, until `shut_down`."""
        while True:
            self._take_orders()
            if self._ended:
                return
            self._prefill_one_chunk()
            self._decode_one_step()

    # --- orders -----------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        with self._arrived:
            if self._scheduler.idle and not self._orders:
                self._arrived.wait(_IDLE_SECONDS_MAX)
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            match order:
                case Begin():
                    self._start(order)
                case Stop(key):
                    self._let_go(key)
                case Shutdown():
                    self._ended = True
                case _:
                    assert_never(order)

    def _start(self, begin: Begin) -> None:
        submission = begin.leg.submission
        answer = Answer(
            submission,
            self._codec,
            eos_ids=self._runner.eos_ids,
            tokens_max=self._tokens_max(begin),
        )
        sequence = Sequence(begin, answer)
        if begin.work is Work.DECODE:
            self._take_over(sequence)
        else:
            self._scheduler.add_prompt(sequence)

    def _tokens_max(self, begin: Begin) -> int:
        """A prefill leg answers with one token; others are cut where the pages end."""
        if begin.work is Work.PREFILL:
            return 1
        submission = begin.leg.submission
        rows = min(len(begin.pages) * self._runner.layout.page_size, self._runner.max_context)
        # The last token needs no row.
        return min(submission.output_tokens_max, rows - len(submission.token_ids) + 1)

    def _let_go(self, key: Key) -> None:
        sequence = self._scheduler.find(key)
        if sequence is not None:
            self._scheduler.remove(sequence)
        self._post(ComputeStopped(key))

    # --- prompts ----------------------------------------------------------------------------------

    def _prefill_one_chunk(self) -> None:
        sequence = self._scheduler.next_prompt()
        if sequence is None:
            return
        try:
            sampled = self._compute_chunk(sequence)
        except MODEL_FAULTS as error:
            self._fail((sequence,), error)
            return
        if sampled is None:
            return
        self._scheduler.remove(sequence)
        if sequence.begin.work is Work.PREFILL:
            self._hand_over(sequence, sampled)
        else:
            self._emit(sequence, sampled, waiting=True)

    def _compute_chunk(self, sequence: Sequence) -> Sampled | None:
        """One forward; the first token once the prompt is complete."""
        start, end = sequence.next_chunk(self._bounds.chunk_tokens)
        submission = sequence.submission
        written: Written = _ignore_rows
        if sequence.begin.work is Work.PREFILL:
            written = self._reporting(sequence.begin.key)
        logits = self._runner.prefill(
            sequence.begin.pages, submission.token_ids, start, end, written
        )
        self._telemetry.prompt_tokens_computed.inc(end - start)
        sequence.rows = end
        if not sequence.prompt_computed or logits is None:
            return None
        return self._choose(sequence, logits)

    def _reporting(self, key: Key) -> Written:
        def written(region: int, start: int, end: int) -> None:
            self._post(RowsWritten(key, region, start, end))

        return written

    def _hand_over(self, sequence: Sequence, sampled: Sampled) -> None:
        """Leave the first token where the sender finds it, and answer the prefill leg with it."""
        key, slot = sequence.begin.key, sequence.begin.slot
        if slot is not None:
            self._metadata.write(
                slot,
                MetadataRow(
                    token=sampled.token_id,
                    logprob=sampled.logprob,
                    top_logprobs=sampled.top_logprobs,
                    room=key.room,
                ),
            )
        sequence.begin.leg.emit(sequence.answer.take(sampled))
        self._post(PromptComputed(key))

    # --- answers ----------------------------------------------------------------------------------

    def _take_over(self, sequence: Sequence) -> None:
        """Begin an answer with the first token that prefill left in the metadata slot."""
        begin = sequence.begin
        if begin.slot is None:
            self._post(ComputeStopped(begin.key, Reason.METADATA_CORRUPT, "no metadata slot"))
            return
        row = self._metadata.read(begin.slot, top_logprobs=sequence.submission.sampling.logprobs)
        fault = row_fault(row, room=begin.key.room, vocab_size=self._runner.vocab_size)
        if fault:
            detail = f"the row in metadata slot {begin.slot} cannot be used: {fault}"
            self._post(ComputeStopped(begin.key, Reason.METADATA_CORRUPT, detail))
            return
        first = Sampled(row.token, row.logprob or 0.0, row.top_logprobs)
        self._emit(sequence, first, waiting=True)

    def _decode_one_step(self) -> None:
        batch = self._scheduler.next_batch()
        if not batch:
            return
        try:
            logits = self._runner.decode([sequence.decode_row() for sequence in batch])
        except MODEL_FAULTS as error:
            self._fail(batch, error)
            return
        for sequence, row in zip(batch, logits, strict=True):
            sequence.rows += 1
            try:
                sampled = self._choose(sequence, row)
            except MODEL_FAULTS as error:
                self._fail((sequence,), error)
            else:
                self._emit(sequence, sampled, waiting=False)

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> Sampled:
        sampled = sample(
            logits,
            sequence.submission.sampling,
            history=sequence.history,
            output=sequence.outputs,
            position=len(sequence.history),
        )
        self._telemetry.tokens_generated.inc()
        return sampled

    def _emit(self, sequence: Sequence, sampled: Sampled, *, waiting: bool) -> None:
        """One token out; the sequence goes on unless it was the last."""
        output = sequence.answer.take(sampled)
        sequence.append(sampled.token_id)
        sequence.begin.leg.emit(output)
        if output.finish is not None:
            self._scheduler.remove(sequence)
            self._post(DecodeFinished(sequence.begin.key))
        elif waiting:
            self._scheduler.add_answer(sequence)

    def _fail(self, sequences: tuple[Sequence, ...], error: Exception) -> None:
        detail = f"{type(error).__name__}: {error}"[:_DETAIL_CHARACTERS_MAX]
        reason = error.reason if isinstance(error, PDClusterError) else Reason.MODEL_FAILED
        for sequence in sequences:
            self._scheduler.remove(sequence)
            self._post(ComputeStopped(sequence.begin.key, reason, detail))


def _ignore_rows(_region: int, _start: int, _end: int) -> None:
    """Nobody waits for the rows of a request that is computed alone."""
