"""From a sequence's answer to its client: raw where one sequence is the whole request."""

from __future__ import annotations

from collections.abc import Callable

from pdcluster_protocol.errors import Reason, WireError
from pdcluster_protocol.ids import Role
from pdcluster_protocol.pair import Cause
from pdcluster_sidecar.router.exchange import Exchange
from pdcluster_sidecar.router.merge import MergedAnswer, MergedStream
from pdcluster_sidecar.router.replies import Failure

RETRY_AFTER_SECONDS = 1
Concluded = Callable[[Cause | None], None]


class SingleRelay:
    """One sequence is the whole request: decode's bytes are the client's bytes."""

    __slots__ = ("_answer", "_content_type", "_exchange", "_on_end")

    def __init__(self, exchange: Exchange, on_end: Concluded) -> None:
        self._exchange = exchange
        self._on_end = on_end
        self._answer: bytes | None = None
        self._content_type = b""

    def take_events(self, events: bytes) -> None:
        exchange = self._exchange
        if not exchange.streams:
            exchange.begin_stream()
        exchange.write(events)

    def take_answer(self, body: bytes, content_type: bytes) -> None:
        self._answer = body
        self._content_type = content_type

    def conclude(self, cause: Cause | None) -> None:
        exchange = self._exchange
        self._on_end(cause)
        if cause is not None:
            refuse(exchange, cause)
        elif self._answer is not None:
            exchange.answer(200, self._answer, content_type=self._content_type)
        else:
            if not exchange.streams:
                exchange.begin_stream()
            exchange.end_stream()


class MergingRelay:
    """Several sequences are one request: their answers become one, or one error ends them all."""

    def __init__(
        self,
        exchange: Exchange,
        merged: MergedAnswer | MergedStream,
        on_end: Concluded,
    ) -> None:
        self._exchange = exchange
        self._merged = merged
        self._on_end = on_end
        self._left = merged.part_count
        self.ended = False

    def part(self, index: int) -> MergedPart:
        """The sink of one sequence."""
        return MergedPart(self, index)

    def take_events(self, index: int, events: bytes) -> None:
        if self.ended or not isinstance(self._merged, MergedStream):
            return
        try:
            rewritten = self._merged.rewrite(index, events)
        except WireError as error:
            self._break(error)
            return
        if not rewritten:
            return
        if not self._exchange.streams:
            self._exchange.begin_stream()
        self._exchange.write(rewritten)

    def take_answer(self, index: int, body: bytes) -> None:
        if not self.ended and isinstance(self._merged, MergedAnswer):
            self._merged.take(index, body)

    def conclude(self, cause: Cause | None) -> None:
        """One sequence has ended; the first failure, or the last success, ends the request."""
        self._left -= 1
        if self.ended or (cause is None and self._left > 0):
            return
        if cause is not None:
            self._end(cause)
            return
        try:
            rest = self._rest()
        except WireError as error:
            self._break(error)
            return
        self._end(None)
        if isinstance(self._merged, MergedAnswer):
            self._exchange.answer(200, rest)
            return
        if not self._exchange.streams:
            self._exchange.begin_stream()
        self._exchange.write(rest)
        self._exchange.end_stream()

    def _rest(self) -> bytes:
        merged = self._merged
        return merged.tail() if isinstance(merged, MergedStream) else merged.body()

    def _break(self, error: WireError) -> None:
        """An engine's answer makes no sense: that is decode's failure."""
        self._end(Cause(reason=error.reason, detail=error.detail, role=Role.DECODE, status=502))

    def _end(self, cause: Cause | None) -> None:
        self.ended = True
        self._on_end(cause)
        if cause is not None:
            refuse(self._exchange, cause)


class MergedPart:
    """One sequence's way into a `MergingRelay`."""

    __slots__ = ("_index", "_whole")

    def __init__(self, whole: MergingRelay, index: int) -> None:
        self._whole = whole
        self._index = index

    def take_events(self, events: bytes) -> None:
        self._whole.take_events(self._index, events)

    def take_answer(self, body: bytes, content_type: bytes) -> None:
        self._whole.take_answer(self._index, body)

    def conclude(self, cause: Cause | None) -> None:
        self._whole.conclude(cause)


def refuse(exchange: Exchange, cause: Cause) -> None:
    """End a client's request with the cause; one who left, or does not read, is dropped."""
    if exchange.ended:
        return
    if cause.reason is Reason.CLIENT_GONE:
        exchange.drop()
        return
    leg = f"{cause.role} leg: " if cause.role is not None else ""
    busy = cause.status in {429, 503}
    exchange.fail(
        Failure(
            status=cause.status,
            reason=cause.reason,
            message=f"{leg}{cause.detail}",
            leg=cause.role,
            retry_after_seconds=RETRY_AFTER_SECONDS if busy else None,
        )
    )
