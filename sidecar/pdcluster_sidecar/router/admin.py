"""What people and `pdctl` ask a router: metrics, members, and a short request through a named pair.

A port of its own, on aiohttp. Everything but `/metrics` and `/health` must be signed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web

from pdcluster_protocol.authentication import HEADER, HttpVerifier, own_authorities
from pdcluster_protocol.config import RouterConfig
from pdcluster_protocol.errors import InvalidRequest, NotReady, PDClusterError, Reason
from pdcluster_protocol.undecodable import UNDECODABLE
from pdcluster_sidecar.bodies import Bodies
from pdcluster_sidecar.router.canary import CanaryAnswer, CanaryRequest
from pdcluster_sidecar.router.members import Members
from pdcluster_sidecar.router.replies import Failure
from pdcluster_sidecar.router.telemetry import Metrics

CANARY_SECONDS: Final = 60.0
OPEN: Final = frozenset({"/metrics", "/health"})
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BODY_BYTES_MAX: Final = 64 << 10


RunCanary = Callable[[CanaryRequest], Awaitable[CanaryAnswer]]


class Admin:
    """The admin application."""

    def __init__(
        self,
        config: RouterConfig,
        members: Members,
        metrics: Metrics,
        verifier: HttpVerifier,
        run_canary: RunCanary,
    ) -> None:
        self._bodies = Bodies()
        self._config = config
        self._members = members
        self._metrics = metrics
        self._verifier = verifier
        self._run_canary = run_canary

    def application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._guard], client_max_size=BODY_BYTES_MAX, handler_args={}
        )
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._render_metrics),
                web.get("/pd/v1/members", self._list_members),
                web.post("/pd/v1/canary", self._canary),
            ]
        )
        return application

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        try:
            if request.path in OPEN:
                return await handler(request)
            async with self._bodies.read(request) as body:
                self._verify(request, body)
                return await handler(request)
        except web.RequestPayloadError as error:
            message = f"the body is not what its headers say: {error}"
            return _failed(Failure.because(Reason.INVALID_REQUEST, message))
        except PDClusterError as error:
            return _failed(Failure.of(error))
        except web.HTTPException as error:
            reason = Reason.TOO_LARGE if error.status == 413 else Reason.UNSUPPORTED
            message = f"{request.method} {request.path[:200]}: {error.reason}"
            return _failed(Failure(status=error.status, reason=reason, message=message))

    def _verify(self, request: web.Request, body: bytes) -> None:
        config, sockname = self._config, request.get_extra_info("sockname")
        self._verifier.verify(
            request.headers.get(HEADER),
            request.method,
            request.raw_path,
            body,
            authorities=own_authorities(config.host, config.admin_port, sockname),
        )

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _render_metrics(self, _request: web.Request) -> web.Response:
        headers = {"content-type": METRICS_TYPE}
        return web.Response(body=self._metrics.render(), headers=headers)

    async def _list_members(self, _request: web.Request) -> web.Response:
        return _json({"members": self._members.views()})

    async def _canary(self, request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=CanaryRequest)
        except UNDECODABLE as error:
            raise InvalidRequest(
                f"the body is wrong ({error}); send prefill and decode, two instance names"
            ) from error
        try:
            async with asyncio.timeout(CANARY_SECONDS):
                answer = await self._run_canary(wanted)
        except TimeoutError:
            raise NotReady(f"the canary was not answered within {CANARY_SECONDS:g} s") from None
        return _json(answer)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _failed(failure: Failure) -> web.Response:
    headers = {name.decode(): value.decode() for name, value in failure.headers()}
    return web.Response(
        status=failure.status,
        body=failure.body(),
        content_type="application/json",
        headers=headers,
    )
