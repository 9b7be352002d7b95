"""The connections of whoever asks over HTTP, bounded as `callers` says."""

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
