"""The byte path out: legs to engines over pooled HTTP/1.1 connections.

A `Leg` is one signed request and its answer; a connection carries one leg at a time. What comes
back goes to the leg's listener as it is read. A connection that is closed, refused or answers
nonsense is reported once, as lost; nothing is repeated here, since whether a try may be repeated is
the pair's decision.

Idle connections are kept for less time than servers keep theirs, so that a leg is hardly ever sent
into a connection that the engine is just closing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

import httptools

from pdcluster_protocol.authentication import HEADER, HttpSigner
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import RankAddress

CONNECT_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 15.0
IDLE_CONNECTIONS_MAX: Final = 256
"""Per engine."""
JOINED_BODY_BYTES_MAX: Final = 64 << 10


class LegListener(Protocol):
    """Who is told what a leg brings; after `on_end` or `on_lost` there is nothing more."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def on_part(self, part: bytes) -> None: ...

    def on_fed(self) -> None:
        """All that one read has brought was given."""

    def on_end(self) -> None: ...

    def on_lost(self, reason: Reason, detail: str) -> None: ...


class Leg:
    """The handle of one request to an engine: it can be held back, drained and cancelled."""

    __slots__ = ("_connection", "_held", "_timer", "listener")

    def __init__(self, listener: LegListener) -> None:
        self.listener: LegListener | None = listener
        self._connection: LegConnection | None = None
        self._held = False
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, connection: LegConnection) -> None:
        self._connection = connection
        connection.hold(held=self._held)

    def cancel(self) -> None:
        """Close the leg's connection; the listener hears nothing more."""
        self.listener = None
        if self._timer is not None:
            self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def drain(self, *, seconds: float) -> None:
        """Let the answer end unheard, so that the connection can be used again; else cancel."""
        self.listener = None
        if self._connection is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.cancel)

    def hold(self, *, held: bool) -> None:
        """Stop or resume reading from the engine, also when the connection stands only later."""
        self._held = held
        if self._connection is not None:
            self._connection.hold(held=held)

    def done(self) -> LegListener | None:
        """Take the leg off its connection; returns who is to be told."""
        listener, self.listener = self.listener, None
        self._connection = None
        if self._timer is not None:
            self._timer.cancel()
        return listener


class LegConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: LegPool, address: RankAddress) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._leg: Leg | None = None
        self._headers: dict[bytes, bytes] = {}
        self._status = 0
        self._whole = False
        self._overran = False
        """More came behind the answer: it is nobody's, and the connection is not used again."""
        self._keeps_alive = False
        self._held = False
        self.address = address
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether a leg can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, leg: Leg) -> None:
        """Send one request; its answer goes to the leg's listener."""
        transport = self._transport
        self._leg = leg
        leg.attach(self)
        if transport is None:
            self._lose(Reason.ENGINE_DIED, f"{self.address} is not connected")
        elif len(body) <= JOINED_BODY_BYTES_MAX:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def hold(self, *, held: bool) -> None:
        """Stop or resume reading."""
        if self._transport is None or self._held == held:
            return
        self._held = held
        if held:
            self._transport.pause_reading()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close at once; a leg that is under way is forgotten."""
        self._leg = None
        if self._transport is not None:
            self._transport.abort()

    # --- transport ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, but have their methods.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        why = f": {exc}" if exc is not None else ""
        self._lose(Reason.ENGINE_DIED, f"{self.address} closed the connection{why}")

    def data_received(self, data: bytes) -> None:
        leg = self._leg
        if leg is None:
            # Nothing was asked: whoever answers now is out of step.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(Reason.WIRE_ERROR, f"{self.address} does not speak HTTP: {error}")
            self.close()
            return
        if leg.listener is not None:
            leg.listener.on_fed()
        if self._whole:
            self._complete(leg)

    # --- parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._overran = self._whole

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._overran:
            return
        self._status = self._parser.get_status_code()
        leg = self._leg
        if self._status >= 200 and leg is not None and leg.listener is not None:
            leg.listener.on_head(self._status, self._headers)

    def on_body(self, part: bytes) -> None:
        leg = self._leg
        # An interim answer has no body, whatever it says.
        answers = self._status >= 200 and not self._overran
        if answers and leg is not None and leg.listener is not None:
            leg.listener.on_part(part)

    def on_message_complete(self) -> None:
        if self._overran:
            return
        # An interim answer such as 100 is no answer yet.
        self._whole = self._status >= 200
        # Asked here: a moment later the parser has forgotten how the message was framed.
        self._keeps_alive = self._parser.should_keep_alive()
        self._headers = {}

    # --- inside ---------------------------------------------------------------------------------

    def _complete(self, leg: Leg) -> None:
        self._whole = False
        if self._leg is not leg:
            return
        self._leg = None
        listener = leg.done()
        if self._keeps_alive and self.usable and not self._overran:
            self.hold(held=False)
            self._pool.keep(self)
        else:
            self.close()
        if listener is not None:
            listener.on_end()

    def _lose(self, reason: Reason, detail: str) -> None:
        leg, self._leg = self._leg, None
        listener = leg.done() if leg is not None else None
        if listener is not None:
            listener.on_lost(reason, detail)


class LegPool:
    """Connections to all engines, and the signature on every leg."""

    def __init__(self, signer: HttpSigner, *, now: Callable[[], float]) -> None:
        self._signer = signer
        self._now = now
        self._idle: dict[RankAddress, list[LegConnection]] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def idle_count(self) -> int:
        """Connections that wait for a leg."""
        return sum(map(len, self._idle.values()))

    def post(self, address: RankAddress, path: str, body: bytes, listener: LegListener) -> Leg:
        """Send a leg now, or as soon as a connection stands."""
        leg = Leg(listener)
        connection = self._take_idle(address)
        if connection is not None:
            connection.send(self._head(address, path, body), body, leg)
            return leg
        task = asyncio.get_running_loop().create_task(self._connect(address, path, body, leg))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return leg

    def keep(self, connection: LegConnection) -> None:
        """Take back a connection whose leg has ended."""
        idle = self._idle.setdefault(connection.address, [])
        if len(idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
            return
        connection.idle_since = self._now()
        idle.append(connection)

    def forget(self, connection: LegConnection) -> None:
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)

    def sweep(self) -> None:
        """Close connections that have been idle for long; the oldest come first in each list."""
        idle_before = self._now() - IDLE_SECONDS
        for address, idle in tuple(self._idle.items()):
            while idle and idle[0].idle_since <= idle_before:
                idle.pop(0).close()
            if not idle:
                del self._idle[address]

    async def close(self) -> None:
        """Close everything that is idle or being connected."""
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for idle in tuple(self._idle.values()):
            for connection in tuple(idle):
                connection.close()
        self._idle.clear()

    def _take_idle(self, address: RankAddress) -> LegConnection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self, address: RankAddress, path: str, body: bytes, leg: Leg) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: LegConnection(self, address), address.host, address.port
                )
        except (OSError, UnicodeError) as error:
            # TimeoutError is one of them; UnicodeError is what a host that is no name brings.
            listener = leg.done()
            if listener is not None:
                text = error.strerror if isinstance(error, OSError) else str(error)
                why = text or f"no connection within {CONNECT_SECONDS:g} s"
                listener.on_lost(Reason.PEER_UNREACHABLE, f"{address} cannot be reached: {why}")
            return
        if leg.listener is None:
            # Cancelled meanwhile; the fresh connection serves the next leg.
            self.keep(connection)
        else:
            # Signed only now: counters that were drawn long ago would fall out of the window.
            connection.send(self._head(address, path, body), body, leg)

    def _head(self, address: RankAddress, path: str, body: bytes) -> bytes:
        host = str(address)
        signature = self._signer.sign("POST", path, body, authority=host)
        return (
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{HEADER}: {signature}\r\n\r\n"
        ).encode("latin-1")
