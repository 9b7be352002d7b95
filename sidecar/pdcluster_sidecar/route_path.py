"""The byte path of `/route`: plain requests are answered here, all others by the HTTP library.

A prefill's ranks register in a storm and every decode rank asks for every one of them, so these
requests come by the ten thousand, and the library costs more than the answer. A connection begins
here. As long as it brings whole, plain requests to `/route`, each is parsed, checked and answered
where it arrives. At the first byte that is anything else (another path, a second request behind
the first, an odd header, a wrong signature) the connection and all bytes since the last answer go
to the library for good. So this module has no opinion on what is unusual, and keeps no state but a
request whose body is still on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools
from yarl import URL

from pdcluster_protocol.authentication import HEADER, HttpVerifier, own_authorities
from pdcluster_protocol.callers import Callers
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.errors import Unauthorized
from pdcluster_protocol.push.registration import RANKS_MAX
from pdcluster_protocol.push.registry import Answer, RegistryNode
from pdcluster_sidecar.connections import Refused

PATH: Final = b"/route"
ANSWERS_MAX: Final = 2 * RANKS_MAX
"""Questions whose answers are kept: one for each rank, with room for other spellings."""
REQUEST_BYTES_MAX: Final = 64 << 10
PIECES_MAX: Final = 3
"""A plain client sends head and body; what comes in more pieces is not for us."""
IDLE_SECONDS: Final = 75.0
"""As the library's for kept-alive connections; here also before a first request."""
_PLAIN_HEADERS: Final = frozenset(
    {b"host", b"user-agent", b"accept", b"accept-encoding", b"content-type", b"content-length"}
)
_KEPT_ALIVE: Final = (b"connection", b"keep-alive")
_SIGNATURE: Final = HEADER.encode()
_PHRASES: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}


class PlainRequest:
    """What the parser finds in the bytes since the last answer."""

    __slots__ = ("body", "method", "plain", "signature", "target", "whole")

    def __init__(self, raw: bytes) -> None:
        self.method = b""
        self.target = b""
        self.signature: bytes | None = None
        self.body = b""
        self.plain = True
        """Nothing in it is for the library, so far."""
        self.whole = False
        # A parser for each request: nothing of one can reach into the next.
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(raw)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.plain = False
        if self.plain and self.whole:
            self.method = parser.get_method()
            self.plain = parser.should_keep_alive() and self._is_for_us()

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == _SIGNATURE and self.signature is None:
            self.signature = value
        elif name not in _PLAIN_HEADERS and (name, value.lower()) != _KEPT_ALIVE:
            self.plain = False

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        # A second request behind the first has to wait for its turn, which is the library's craft.
        self.plain = self.plain and not self.whole
        self.whole = True

    def _is_for_us(self) -> bool:
        path, _, query = self.target.partition(b"?")
        if path != PATH or b"#" in query or not query.isascii():
            return False
        return self.method == b"PUT" or (self.method == b"GET" and not self.body)


class RouteConnection(asyncio.Protocol):
    """One connection until it is the library's."""

    def __init__(self, path: RoutePath) -> None:
        self._path = path
        self._transport: asyncio.Transport
        self._authorities: tuple[str, ...] = ()
        self._held = b""
        self._pieces = 0
        self.idle_since = path.now()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, but have their methods.
        self._transport = cast("asyncio.Transport", transport)
        self._authorities = self._path.authorities(transport.get_extra_info("sockname"))
        self._path.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._path.open.discard(self)

    def pause_writing(self) -> None:
        # It does not read its answers: no further request until it does.
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        data = self._held + data
        request = PlainRequest(data)
        if request.plain and not request.whole and self._hold(data):
            return
        answer = None
        if request.plain and request.whole:
            answer = self._path.answer(request, self._authorities)
        if answer is None:
            self._hand_over(data)
            return
        self._held = b""
        self._pieces = 0
        self.idle_since = self._path.now()
        self._path.callers.answered(self)
        self._transport.write(answer)

    def close(self) -> None:
        """End the connection."""
        self._transport.close()

    def give_way(self) -> bool:
        """Make room for another one, unless it is gone already."""
        if self not in self._path.open:
            return False
        self._transport.abort()
        return True

    def _hold(self, data: bytes) -> bool:
        self._held = data
        self._pieces += 1
        return self._pieces < PIECES_MAX and len(data) <= REQUEST_BYTES_MAX

    def _hand_over(self, data: bytes) -> None:
        self._path.open.discard(self)
        protocol = self._path.library()
        protocol.connection_made(self._transport)
        self._transport.set_protocol(protocol)
        protocol.data_received(data)


class RoutePath:
    """The factory of connections, and what they share."""

    def __init__(
        self,
        config: SidecarConfig,
        registry: RegistryNode,
        verifier: HttpVerifier,
        *,
        library: Callable[[], asyncio.Protocol],
    ) -> None:
        self._config = config
        self._registry = registry
        self._verifier = verifier
        self._answers: dict[bytes, bytes] = {}
        self._changes = registry.changes
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None
        self.library = library
        self.open: set[RouteConnection] = set()
        """Those that the library does not have."""
        self.callers: Callers[RouteConnection] = Callers(RouteConnection.give_way)

    def __call__(self) -> asyncio.Protocol:
        """A connection's protocol, for `create_server`."""
        if self._sweep is None:
            self._sweep = self._loop.call_later(IDLE_SECONDS / 5, self._close_idle)
        if not self.callers.make_room(self.open):
            return Refused()
        connection = RouteConnection(self)
        self.callers.came(connection)
        return connection

    def now(self) -> float:
        return self._loop.time()

    def authorities(self, sockname: object) -> tuple[str, ...]:
        """Our own names, as configured and as a connection found us."""
        return own_authorities(self._config.host, self._config.http_port, sockname)

    def answer(self, request: PlainRequest, authorities: tuple[str, ...]) -> bytes | None:
        """The whole answer; None: the library knows how to refuse it."""
        if self._config.interop != "Allow" and not self._is_signed(request, authorities):
            return None
        if request.method == b"PUT":
            return _encode(self._registry.put_route(request.body))
        return self._known(request.target)

    def close(self) -> None:
        """Close what the library does not."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.open):
            connection.close()

    def _is_signed(self, request: PlainRequest, authorities: tuple[str, ...]) -> bool:
        header = None if request.signature is None else request.signature.decode("latin-1")
        method, target = request.method.decode(), request.target.decode()
        try:
            self._verifier.verify(header, method, target, request.body, authorities=authorities)
        except Unauthorized:
            return False
        return True

    def _known(self, target: bytes) -> bytes:
        """Decoders ask the same few questions again and again."""
        if self._changes != self._registry.changes or len(self._answers) > ANSWERS_MAX:
            self._changes = self._registry.changes
            self._answers.clear()
        found = self._answers.get(target)
        if found is None:
            answer = self._registry.get_route(URL(target.decode(), encoded=True).query)
            found = _encode(answer)
            if answer.status == 200:
                self._answers[target] = found
        return found

    def _close_idle(self) -> None:
        self._sweep = self._loop.call_later(IDLE_SECONDS / 5, self._close_idle)
        before = self.now() - IDLE_SECONDS
        for connection in [each for each in self.open if each.idle_since < before]:
            connection.close()


def _encode(answer: Answer) -> bytes:
    body = answer.text.encode()
    kind = "application/json" if answer.json else "text/plain"
    head = (
        f"HTTP/1.1 {answer.status} {_PHRASES[answer.status]}\r\n"
        f"Content-Type: {kind}; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
