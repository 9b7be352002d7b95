"""The byte path in: HTTP/1.1 from clients on a bare protocol around the httptools parser.

One connection takes its requests in turn: a pipelined one waits until the one before it is
answered, and reading stops while too many wait. What is malformed is answered with 400 and the
connection closed (`heads`), what takes too long to arrive with 408. A refused body is not read: the
answer goes out and what still arrives is thrown away for a moment, so that the client gets to read
it. Trailers and chunk extensions are counted and dropped: they mean nothing here.

Back-pressure goes both ways: an `Exchange` says when the client cannot take more (`on_pressure`),
and whoever feeds it stops.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from typing import Final, cast

import httptools

from pdcluster_sidecar.router.exchange import Exchange
from pdcluster_sidecar.router.heads import (
    FRAMING_BYTES_MAX,
    FRAMING_PER_BODY_BYTE,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    SINGLE_HEADERS,
    URL_BYTES_MAX,
    bad,
    overloaded,
    path_of,
    refusal_of_head,
    too_large,
    too_late,
    too_many_headers,
    url_too_long,
)
from pdcluster_sidecar.router.listening import Server
from pdcluster_sidecar.router.replies import CONTINUE, Failure

PIPELINED_PAUSE: Final = 8
"""So many waiting requests stop the reading; what was read already may hold more."""
PIPELINED_MAX: Final = 256
WRITE_BUFFER_BYTES: Final = 256 << 10
UNSENT_BYTES: Final = 128 << 10
"""Of what the kernel holds for a client that reads slowly; by itself it would take megabytes."""
LINGER_SECONDS: Final = 1.0


class ClientConnection(asyncio.Protocol):
    """One client's connection: parses requests, hands them over one at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Exchange] = deque()
        self._arriving: Exchange | None = None
        self._head_open = False
        self._head_bytes = 0
        self._fed_bytes = 0
        """Since the head, or the body, began; what one read brings of both counts for the body."""
        self._header_count = 0
        self._arriving_since = 0.0
        """Of the head while it is open, else of the body."""
        self._url = b""
        self._body: list[bytes] = []
        self._discards = False
        self._paused = False
        self.lost = False
        self.pressed = False
        self.idle_since = server.now()

    # --- transport ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, but have their methods.
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        _bound_unsent(transport)
        if not self._server.admit(self):
            self._refuse(Exchange(self), overloaded("too many connections; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._server.forget(self)
        exchanges = [*self._waiting, *([self._arriving] if self._arriving else [])]
        self._waiting.clear()
        self._arriving = None
        self._body = []
        for exchange in exchanges:
            self._server.unbuffer(exchange.body_bytes)
            if exchange.on_gone is not None:
                exchange.on_gone()

    def eof_received(self) -> bool:
        # A client that half-closes counts as gone: it is how one that left looks at first.
        return False

    def pause_writing(self) -> None:
        self._press(pressed=True)

    def resume_writing(self) -> None:
        self._press(pressed=False)

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        head_was_open = self._head_open
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request itself was taken in; the protocol that it proposes is not spoken here.
            self._discards = True
        except httptools.HttpParserError as error:
            self._refuse(
                self._arriving or Exchange(self), bad(f"the request is not valid HTTP: {error}")
            )
        exchange = self._arriving
        if exchange is None:
            return
        if not self._head_open:
            self._fed_bytes += len(data)
            self._check_framing(exchange)
        elif head_was_open:
            # The parser keeps an unfinished header to itself, so what it was fed is counted too.
            self._fed_bytes += len(data)
            self._check_head_size(exchange, self._fed_bytes)

    # --- parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._discards:
            return
        self._arriving = Exchange(self)
        self._head_open = True
        self._head_bytes = self._fed_bytes = self._header_count = 0
        self._arriving_since = self._server.now()
        self._url = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > URL_BYTES_MAX and self._arriving is not None:
            self._refuse(self._arriving, url_too_long())

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._arriving
        if exchange is None:
            return
        self._header_count += 1
        if self._header_count > HEADERS_MAX:
            message = f"there are more than {HEADERS_MAX} headers and trailers"
            self._refuse(exchange, too_many_headers(message))
            return
        if not self._head_open:
            return
        self._head_bytes += len(name) + len(value)
        name = name.lower()
        if name in exchange.headers and name in SINGLE_HEADERS:
            self._refuse(exchange, bad(f"header {name.decode('latin-1')} is given twice"))
        exchange.headers[name] = value

    def on_headers_complete(self) -> None:
        exchange = self._arriving
        self._head_open = False
        if exchange is None:
            return
        parser = self._parser
        exchange.method = parser.get_method().decode("latin-1")
        exchange.path = path_of(self._url.decode("latin-1"))
        exchange.keep_alive = parser.should_keep_alive() and not parser.should_upgrade()
        version = parser.get_http_version()
        exchange.modern = version == "1.1"
        self.idle_since = self._arriving_since = self._server.now()
        self._fed_bytes = 0
        self._check_head_size(exchange, self._head_bytes)
        body_bytes_max = self._server.limits.body_bytes_max
        refusal = refusal_of_head(exchange, version, body_bytes_max=body_bytes_max)
        if refusal is not None:
            self._refuse(exchange, refusal)
        elif b"expect" in exchange.headers:
            self._invite(exchange)

    def on_body(self, part: bytes) -> None:
        exchange = self._arriving
        if exchange is None:
            return
        self._body.append(part)
        exchange.body_bytes += len(part)
        fits = self._server.buffer(len(part))
        if exchange.body_bytes > self._server.limits.body_bytes_max:
            self._refuse(exchange, too_large(self._server.limits.body_bytes_max))
        elif not fits:
            self._refuse(exchange, overloaded("too many request bodies are under way"))

    def on_message_complete(self) -> None:
        exchange = self._arriving
        if exchange is None:
            return
        exchange.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        exchange.whole = True
        self._body = []
        self._arriving = None
        self._take(exchange)

    # --- what an exchange does ------------------------------------------------------------------

    def write(self, raw: bytes) -> None:
        """Write to the client; after it has left, nothing happens."""
        if not self.lost and self._transport is not None:
            self._transport.write(raw)

    def abort(self) -> None:
        """Close without sending what is still buffered."""
        if self._transport is not None:
            self._transport.abort()

    def exchange_ended(self, exchange: Exchange) -> None:
        """The answer is out: go on with the next request, or close."""
        if self.lost or not self._waiting or self._waiting[0] is not exchange:
            return
        self._waiting.popleft()
        self._server.unbuffer(exchange.body_bytes)
        self.idle_since = self._server.now()
        if not exchange.keep_alive or self._server.closing:
            self._close(linger=not exchange.whole)
            return
        if self._waiting:
            # Not from within the answer before: a long pipeline must not become deep recursion.
            asyncio.get_running_loop().call_soon(self._serve_next)
        if self._paused and len(self._waiting) < PIPELINED_PAUSE and self._transport is not None:
            self._paused = False
            self._arriving_since = self._server.now()
            self._transport.resume_reading()

    def expire(self) -> None:
        """Refuse a request that takes too long to arrive; close where none has begun for long."""
        limits, now = self._server.limits, self._server.now()
        if self._arriving is None or self._paused:
            self.close_if_idle(idle_before=now - limits.idle_seconds)
            return
        what, seconds = "the body", limits.body_seconds
        if self._head_open:
            what, seconds = "the head of the request", limits.head_seconds
        if now - self._arriving_since > seconds:
            self._refuse(self._arriving, too_late(what, seconds))

    def close_if_idle(self, *, idle_before: float) -> None:
        """Close a connection on which nothing has been asked for since `idle_before`."""
        if not self._waiting and self.idle_since <= idle_before:
            if self._transport is not None and self._transport.get_write_buffer_size() > 0:
                # The client does not read its answer: a polite close would wait for it for ever.
                self._transport.abort()
                return
            self._close(linger=False)

    # --- inside ---------------------------------------------------------------------------------

    def _refuse(self, exchange: Exchange, refusal: Failure) -> None:
        """Put an error into the line, as the last thing of this connection."""
        if self._discards:
            return
        self._discards = True
        self._arriving = None
        self._head_open = False
        self._body = []
        exchange.refusal = refusal
        exchange.keep_alive = False
        self._take(exchange)

    def _take(self, exchange: Exchange) -> None:
        self._waiting.append(exchange)
        if len(self._waiting) == 1:
            self._serve_next()
        elif len(self._waiting) >= PIPELINED_PAUSE and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
            if len(self._waiting) >= PIPELINED_MAX and exchange.refusal is None:
                self._refuse(Exchange(self), overloaded("too many pipelined requests"))

    def _serve_next(self) -> None:
        if self.lost or not self._waiting:
            return
        exchange = self._waiting[0]
        if exchange.refusal is not None:
            exchange.fail(exchange.refusal)
            return
        self._server.handler(exchange)

    def _invite(self, exchange: Exchange) -> None:
        # Behind other requests the body comes uninvited, when the client's patience has ended.
        if not self._waiting and exchange.modern:
            self.write(CONTINUE)

    def _check_head_size(self, exchange: Exchange, nbytes: int) -> None:
        if nbytes > HEAD_BYTES_MAX:
            message = f"the headers are longer than {HEAD_BYTES_MAX} bytes"
            self._refuse(exchange, too_many_headers(message))

    def _check_framing(self, exchange: Exchange) -> None:
        bytes_max = FRAMING_BYTES_MAX + FRAMING_PER_BODY_BYTE * exchange.body_bytes
        if self._fed_bytes > bytes_max:
            self._refuse(exchange, bad("the chunks of the body have more framing than content"))

    def _press(self, *, pressed: bool) -> None:
        self.pressed = pressed
        if self._waiting and (tell := self._waiting[0].on_pressure) is not None:
            tell(pressed)

    def _close(self, *, linger: bool) -> None:
        """Close after what is buffered; with `linger`, first let the client read the answer."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._discards = True
        if linger and transport.can_write_eof():
            if self._paused:
                transport.resume_reading()
            transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)
            return
        transport.close()


def _bound_unsent(transport: asyncio.Transport) -> None:
    """Let the kernel say early that a client does not read, and soon that it reads again."""
    connection = transport.get_extra_info("socket")
    if connection is not None and sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
