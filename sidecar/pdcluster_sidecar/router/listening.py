"""The listening side: all connections of clients, and the bounds that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from pdcluster_sidecar.router.exchange import Exchange


class ServeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the client side."""

    body_bytes_max: int
    buffered_bytes_max: int = 512 << 20
    """Bodies of all connections together."""
    connections_max: int = 8192
    idle_seconds: float = 75.0
    """A connection without a request."""
    head_seconds: float = 10.0
    """From the first byte of a request to the end of its head."""
    body_seconds: float = 60.0
    """From there to the end of its body."""
    sweep_seconds: float = 1.0
    """How often all connections look at the clock."""


class Connection(Protocol):
    """What the server asks of a connection."""

    def expire(self) -> None: ...

    def close_if_idle(self, *, idle_before: float) -> None: ...

    def abort(self) -> None: ...


class Server:
    """What connections share: the handler of requests, limits, and counts against them."""

    def __init__(
        self,
        handler: Callable[[Exchange], None],
        limits: ServeLimits,
        *,
        now: Callable[[], float],
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.now = now
        self.closing = False
        self._connections: set[Connection] = set()
        self._buffered = 0

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        """Count a connection; False when there are too many."""
        self._connections.add(connection)
        return len(self._connections) <= self.limits.connections_max

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def buffer(self, nbytes: int) -> bool:
        """Count bytes of a body that is arriving; False when all of them are too many."""
        self._buffered += nbytes
        return self._buffered <= self.limits.buffered_bytes_max

    def unbuffer(self, nbytes: int) -> None:
        self._buffered -= nbytes

    def sweep(self) -> None:
        """Tell all connections to look at the clock."""
        for connection in tuple(self._connections):
            connection.expire()

    def close_idle(self) -> None:
        """Take nothing more on open connections: idle ones close now, the others when answered."""
        self.closing = True
        for connection in tuple(self._connections):
            connection.close_if_idle(idle_before=self.now())

    def abort_all(self) -> None:
        for connection in tuple(self._connections):
            connection.abort()
