"""The connections of clients, bounded as `callers` says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, cast

from aiohttp import web

from pdcluster_protocol.callers import BUSY, CONNECTIONS_MAX, Callers

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """Which connections of one server are being answered, and which may be closed for others."""

    __slots__ = ("callers",)

    def __init__(self, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self.callers: Callers[web.RequestHandler] = Callers(_close, connections_max=connections_max)

    @web.middleware
    async def mark(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Know that a connection is being answered."""
        self.callers.asked(request.protocol)
        try:
            return await handler(request)
        finally:
            self.callers.answered(request.protocol)

    def admit(self, server: web.Server) -> asyncio.Protocol:
        """The protocol of a new connection, after making room for it."""
        if not self.callers.make_room(server.connections):
            return Refused()
        connection = server()
        self.callers.came(connection)
        return connection


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


class Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        closing = cast("asyncio.Transport", transport)
        closing.write(BUSY)
        closing.close()


def _close(connection: web.RequestHandler) -> bool:
    transport = connection.transport
    if transport is None:
        return False
    connection.force_close()
    # Whoever does not read its answer would keep a closing connection for ever.
    transport.abort()
    return True
