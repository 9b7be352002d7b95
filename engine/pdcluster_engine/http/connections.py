"""The connections of clients: bounded, and whoever asks for nothing makes room first.

An open connection costs a descriptor and some memory, whether or not anything is asked on it. Over
the bound a newcomer takes the place of the connection that has been without a request longest, so
many idle ones shut nobody out; while all are being answered, the newcomer is told to come again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, cast

from aiohttp import web

CONNECTIONS_MAX: Final = 4096
CLOSED_KEPT_MAX: Final = 256
"""So many closed connections may be remembered before they are swept."""
BUSY: Final = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """Which connections are being answered, and which may be closed for others."""

    __slots__ = ("_busy", "_connections_max", "_idle", "closed", "refused")

    def __init__(self, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self._connections_max = connections_max
        self._busy: set[web.RequestHandler] = set()
        self._idle: OrderedDict[web.RequestHandler, None] = OrderedDict()
        """In the order of their last answer, or of their beginning; some are closed already."""
        self.closed = 0
        """Idle ones that made room."""
        self.refused = 0

    @web.middleware
    async def mark(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Know that a connection is being answered."""
        connection = request.protocol
        self._idle.pop(connection, None)
        self._busy.add(connection)
        try:
            return await handler(request)
        finally:
            self._busy.discard(connection)
            self._idle[connection] = None

    def admit(self, server: web.Server) -> asyncio.Protocol:
        """The protocol of a new connection, after making room for it."""
        open_now = server.connections
        if len(self._idle) > len(open_now) + CLOSED_KEPT_MAX:
            still = set(open_now)
            self._idle = OrderedDict((each, None) for each in self._idle if each in still)
        if len(open_now) >= self._connections_max and not self._made_room():
            self.refused += 1
            return _Refused()
        connection = server()
        self._idle[connection] = None
        return connection

    def _made_room(self) -> bool:
        while self._idle:
            longest, _ = self._idle.popitem(last=False)
            if longest.transport is not None:
                longest.force_close()
                self.closed += 1
                return True
        return False


CONNECTIONS: Final = web.AppKey("connections", Connections)


class BoundedSite(web.TCPSite):
    """A listening socket whose connections are counted."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, *, connections: Connections
    ) -> None:
        super().__init__(runner, host, port)
        self._connections = connections

    async def start(self) -> None:
        """Listen; an `OSError` says why not."""
        await web.BaseSite.start(self)
        server = cast(web.Server, self._runner.server)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: self._connections.admit(server), self._host, self._port, backlog=512
        )


class _Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        closing = cast("asyncio.Transport", transport)
        closing.write(BUSY)
        closing.close()
