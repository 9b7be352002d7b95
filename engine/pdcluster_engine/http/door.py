"""Who may come in: bounded bodies, signatures, and what only a signed request may name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from pdcluster_engine.http.bodies import Bodies
from pdcluster_protocol.authentication import HEADER, HttpVerifier, KeyRing, own_authorities
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import Unauthorized
from pdcluster_protocol.requests import LegFields


class Door:
    """Reads bodies and checks signatures for one server."""

    __slots__ = ("_bodies", "_config", "_plain_peers_welcome", "_verifier")

    def __init__(self, config: EngineConfig, ring: KeyRing | None) -> None:
        self._bodies = Bodies()
        self._config = config
        self._plain_peers_welcome = config.interop == "Allow"
        self._verifier = None if ring is None else HttpVerifier(ring)

    @web.middleware
    async def count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Count a body no longer once its request has ended."""
        try:
            return await handler(request)
        finally:
            self._bodies.release(request)

    async def read(self, request: web.Request) -> tuple[bytes, bool]:
        """The body, and whether it was signed with the cluster's key.

        Raises:
            InvalidRequest: the body cannot be decoded, or is too slow.
            Overloaded: too many bodies are under way.
            Unauthorized: a signature is there and is wrong.
            web.HTTPRequestEntityTooLarge: the body is over the server's bound.
        """
        body = await self._bodies.read(request)
        header = request.headers.get(HEADER)
        if header is None or self._verifier is None:
            return body, False
        config, sockname = self._config, request.get_extra_info("sockname")
        self._verifier.verify(
            header,
            request.method,
            request.raw_path,
            body,
            authorities=own_authorities(config.host, config.http_port, sockname),
        )
        return body, True

    def require_leg(self, leg: LegFields | None, *, signed: bool) -> None:
        """Only the cluster's own routers may name a partner.

        Raises:
            Unauthorized: the request names one, is not signed, and plain peers are not welcome.
        """
        if leg is not None and leg.paired and not signed and not self._plain_peers_welcome:
            raise Unauthorized(
                f"bootstrap_room names a partner and header {HEADER} is missing; let the cluster's"
                " router send the leg, or set security.interop: Allow for routers of others"
            )

    def require_member(self, *, signed: bool) -> None:
        """An operation that is not open to clients.

        Raises:
            Unauthorized: it is not signed, and plain peers are not welcome.
        """
        if not signed and not self._plain_peers_welcome:
            raise Unauthorized(
                f"header {HEADER} is missing; the request must be signed with the cluster's key,"
                " or set security.interop: Allow for programs of others"
            )
