"""The HTTP side: which paths are open, which need a signature, and how errors are answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web

from pdcluster_protocol.authentication import HEADER, HttpSigner, HttpVerifier, own_authorities
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.errors import PDClusterError, Unauthorized, WireError
from pdcluster_sidecar.bodies import Bodies
from pdcluster_sidecar.connections import CONNECTIONS, Connections
from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.relay import Relay
from pdcluster_sidecar.routes import control, health, pods, registry
from pdcluster_sidecar.telemetry import Metrics

BODY_BYTES_MAX: Final = 4 << 20
SIGNED_PREFIX: Final = "/pd/v1/"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    config: SidecarConfig,
    *,
    ranks: Ranks,
    relay: Relay,
    metrics: Metrics,
    signer: HttpSigner,
    verifier: HttpVerifier,
) -> web.Application:
    """The application of one sidecar."""
    guard = _Guard(config, verifier, metrics)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guard.handle(request, handler)

    connections = Connections()
    app = web.Application(middlewares=[connections.mark, guarded], client_max_size=BODY_BYTES_MAX)
    app[CONNECTIONS] = connections
    health.add(app, ranks, metrics)
    registry.add(app, ranks.registry)
    control.add(app, ranks=ranks, relay=relay, metrics=metrics, signer=signer)
    pods.add(app, ranks=ranks, relay=relay, signer=signer)
    return app


class _Guard:
    """Checks signatures in front of every handler, and turns errors into answers."""

    def __init__(self, config: SidecarConfig, verifier: HttpVerifier, metrics: Metrics) -> None:
        self._config = config
        self._verifier = verifier
        self._metrics = metrics
        self._bodies = Bodies()
        self._interop = config.interop == "Allow"

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check, handle, and answer an error in the words of the path."""
        ours = request.path.startswith(SIGNED_PREFIX)
        try:
            return await self._answer(request, handler, ours=ours)
        except Unauthorized as error:
            self._metrics.unauthorized.inc()
            if ours:
                return _error(error)
            return web.Response(
                status=401,
                text=f"{error.detail}; plain peers are taken only with security.interop: Allow",
            )
        except web.RequestPayloadError as error:
            return _error(WireError(f"the body is not what its headers say: {error}"))
        except PDClusterError as error:
            return _error(error)

    async def _answer(
        self, request: web.Request, handler: Handler, *, ours: bool
    ) -> web.StreamResponse:
        signed = ours or (request.path in registry.PATHS and not self._interop)
        if signed and not request.headers.get(HEADER):
            # There is nothing to check a body against, so none is taken in.
            self._verify(request, b"")
        async with self._bodies.read(request) as body:
            if signed:
                request[control.SESSION] = self._verify(request, body)
            return await handler(request)

    def _verify(self, request: web.Request, body: bytes) -> str:
        config, sockname = self._config, request.get_extra_info("sockname")
        return self._verifier.verify(
            request.headers.get(HEADER),
            request.method,
            request.raw_path,
            body,
            authorities=own_authorities(config.host, config.http_port, sockname),
        )


def _error(error: PDClusterError) -> web.Response:
    return web.Response(
        status=error.http_status,
        body=msgspec.json.encode({"error": {"code": error.reason, "message": error.detail}}),
        content_type="application/json",
        headers={"x-pd-reason": str(error.reason)},
    )
