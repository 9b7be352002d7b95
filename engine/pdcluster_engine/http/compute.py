"""The paths that compute: from a request to its answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator

import msgspec
from aiohttp import web

from pdcluster_engine.http.chat import ChatShape
from pdcluster_engine.http.completions import CompletionShape
from pdcluster_engine.http.door import Door
from pdcluster_engine.http.exchange import Exchange
from pdcluster_engine.http.generate import GenerateShape
from pdcluster_engine.http.metrics import HttpMetrics
from pdcluster_engine.http.refusals import JSON, error_json
from pdcluster_engine.http.sequences import SequenceFactory
from pdcluster_engine.http.shapes import Fresh, Reply, Shape
from pdcluster_engine.http.tokens import TokenNames
from pdcluster_engine.submission import Engine
from pdcluster_engine.text import TextCodec
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import InvalidRequest, NotReady, PDClusterError, Reason
from pdcluster_protocol.ids import Role
from pdcluster_protocol.requests import Api, ParsedRequest, RequestLimits, parse_request

SHAPES: dict[Api, type[CompletionShape] | type[ChatShape] | type[GenerateShape]] = {
    Api.COMPLETIONS: CompletionShape,
    Api.CHAT: ChatShape,
    Api.GENERATE: GenerateShape,
}
NANOSECONDS = 1_000_000_000


class Aliases:
    """Clients' names that stand for several live sequences; exact names only."""

    __slots__ = ("_exchanges",)

    def __init__(self) -> None:
        self._exchanges: dict[str, Exchange] = {}

    @contextlib.contextmanager
    def naming(self, rids: tuple[str, ...], exchange: Exchange) -> Iterator[None]:
        """Make names known while the exchange runs.

        Raises:
            InvalidRequest: `RidInUse`.
        """
        own = {sequence.submission.rid for sequence in exchange.sequences}
        names = [rid for rid in rids if rid not in own]
        for rid in names:
            if rid in self._exchanges:
                raise InvalidRequest(
                    f"rid {rid!r} names a live request here; wait for its end or take another",
                    field="rid",
                    reason=Reason.RID_IN_USE,
                )
        self._exchanges |= dict.fromkeys(names, exchange)
        try:
            yield
        finally:
            for rid in names:
                del self._exchanges[rid]

    def cancel(self, rid: str, reason: Reason) -> bool:
        """End all sequences behind a name; False when there is none."""
        exchange = self._exchanges.get(rid)
        if exchange is None:
            return False
        exchange.cancel(reason, "aborted by its rid")
        return True


class Computation:
    """Answers `/v1/completions`, `/v1/chat/completions` and `/generate`."""

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        config: EngineConfig,
        *,
        door: Door,
        metrics: HttpMetrics,
    ) -> None:
        self._engine = engine
        self._config = config
        self._door = door
        self._metrics = metrics
        self._limits = RequestLimits(
            served_name=config.served_name,
            max_context=config.max_context,
            vocab_size=codec.vocab_size,
        )
        self._factory = SequenceFactory(codec, config, self._limits)
        self._names = TokenNames(codec)
        self.aliases = Aliases()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request; errors before the first byte raise, later ones go into the stream.

        Raises:
            PDClusterError: why there is no answer.
        """
        begun = time.monotonic()
        try:
            body, signed = await self._door.read(request)
            parsed = parse_request(Api(request.path), body, self._limits)
            self._door.require_leg(parsed.leg, signed=signed)
            reply = await self._reply(parsed)
            self._metrics.spent("tokenise", time.monotonic() - begun)
            response, reason = await self._run(request, reply)
        except PDClusterError as error:
            self._metrics.ended(error.reason)
            raise
        except (asyncio.CancelledError, ConnectionError):
            self._metrics.ended(Reason.CLIENT_GONE)
            raise
        self._metrics.ended(reason)
        self._metrics.spent("answer", time.monotonic() - begun)
        return response

    async def _reply(self, parsed: ParsedRequest) -> Reply:
        if parsed.leg is not None and parsed.leg.paired and not self._engine.state().joined:
            raise NotReady("this engine has not joined its sidecar yet; try again later")
        if not parsed.rids:
            parsed = msgspec.structs.replace(parsed, rids=(secrets.token_hex(16),))
        sequences = await self._factory.make(parsed)
        return Reply(
            id=parsed.rids[0],
            # Unix time by definition of the API.
            created=time.time_ns() // NANOSECONDS,
            parsed=parsed,
            sequences=sequences,
            names=self._names,
        )

    async def _run(
        self, request: web.Request, reply: Reply
    ) -> tuple[web.StreamResponse, Reason | None]:
        """Submit and answer; whatever happens, no sequence is left behind."""
        exchange = Exchange(self._engine, list(reply.sequences))
        with self.aliases.naming(reply.parsed.rids, exchange):
            try:
                exchange.submit()
                return await self._answer(request, reply, exchange)
            except (asyncio.CancelledError, ConnectionError):
                exchange.cancel(Reason.CLIENT_GONE, "the HTTP connection of the request closed")
                raise
            finally:
                exchange.cancel(Reason.ABORTED, "another sequence of the request failed")

    async def _answer(
        self, request: web.Request, reply: Reply, exchange: Exchange
    ) -> tuple[web.StreamResponse, Reason | None]:
        parsed = reply.parsed
        shape = SHAPES[parsed.api](reply)
        begun = time.monotonic()
        # The first token decides the status: until then an error is an HTTP error.
        fresh = await exchange.fresh()
        self._metrics.spent("first_token", time.monotonic() - begun)
        if parsed.leg is not None and parsed.leg.paired and self._config.role is Role.PREFILL:
            fresh = await self._handed_over(exchange)
        if parsed.stream:
            return await self._stream(request, shape, exchange, fresh)
        while exchange.open:
            await exchange.fresh()
        return web.Response(body=shape.whole(), content_type=JSON), None

    @staticmethod
    async def _handed_over(exchange: Exchange) -> list[Fresh]:
        """A prefill's leg: its one token, once decode has taken the pages."""
        while exchange.open:
            await exchange.fresh()
        fresh: list[Fresh] = []
        for sequence in exchange.sequences:
            if sequence.outputs:
                last = msgspec.structs.replace(sequence.outputs[-1], finish=sequence.finish)
                sequence.outputs[-1] = last
                fresh.append((sequence, last))
        return fresh

    async def _stream(
        self, request: web.Request, shape: Shape, exchange: Exchange, fresh: list[Fresh]
    ) -> tuple[web.StreamResponse, Reason | None]:
        """Write events as outputs come, one write a wake-up; an error is the last event."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
            }
        )
        await response.prepare(request)
        try:
            await self._write(response, shape.events(fresh))
            while exchange.open:
                fresh = await exchange.fresh()
                if fresh:
                    await self._write(response, shape.events(fresh))
        except PDClusterError as error:
            body = error_json(error.reason, error.detail, status=error.http_status)
            await self._write(response, b"data: " + body + b"\n\n")
            await response.write_eof()
            return response, error.reason
        await self._write(response, shape.ending())
        await response.write_eof()
        return response, None

    async def _write(self, response: web.StreamResponse, events: bytes) -> None:
        """Write, with back-pressure; a client that takes nothing for the stall time is gone."""
        try:
            async with asyncio.timeout(self._config.timeouts.stall_seconds):
                await response.write(events)
        except TimeoutError as error:
            raise ConnectionResetError("the client took no byte for the stall time") from error
