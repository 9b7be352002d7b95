"""The application and its server."""

from __future__ import annotations

import errno
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from aiohttp import web
from prometheus_client import REGISTRY, CollectorRegistry

from pdcluster_engine.http.compute import Computation
from pdcluster_engine.http.connections import CONNECTIONS, BoundedSite, Connections
from pdcluster_engine.http.door import Door
from pdcluster_engine.http.dp_ranks import rank_addresses
from pdcluster_engine.http.metrics import HttpMetrics
from pdcluster_engine.http.refusals import error_answer, refuse
from pdcluster_engine.http.relaying import SEQUENCE_PATH, RelayingEngine
from pdcluster_engine.http.sequence_path import SequencePath
from pdcluster_engine.http.server_log import server_logger
from pdcluster_engine.http.surface import Surface
from pdcluster_engine.submission import Engine
from pdcluster_engine.text import TextCodec
from pdcluster_protocol.authentication import KeyRing
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import ConfigError, PDClusterError, Reason
from pdcluster_protocol.limits import Limits

LOAD_HEADER = "x-pd-load"
SHUTDOWN_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 75.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    engine: Engine,
    codec: TextCodec,
    config: EngineConfig,
    ring: KeyRing | None,
    *,
    registry: CollectorRegistry = REGISTRY,
) -> web.Application:
    """The HTTP side of one engine.

    Without a key ring no leg can be signed: then only `interop: Allow` opens legs.
    """
    door = Door(config, ring)
    metrics = HttpMetrics(config.role, registry)
    path = SequencePath(engine, config, door=door)
    relaying = RelayingEngine(engine, config, addresses=rank_addresses(config))
    engine = relaying
    computation = Computation(engine, codec, config, door=door, metrics=metrics)
    surface = Surface(engine, config, door=door, metrics=metrics, aliases=computation.aliases)
    connections = Connections()
    app = web.Application(
        client_max_size=Limits().body_bytes_max,
        middlewares=[connections.mark, errors_have_one_shape, door.count],
    )
    app[CONNECTIONS] = connections

    async def show_load(_request: web.Request, response: web.StreamResponse) -> None:
        response.headers[LOAD_HEADER] = msgspec.json.encode(engine.state().load).decode()

    async def relay(_app: web.Application) -> AsyncIterator[None]:
        relaying.open(ring, session=secrets.token_hex(8))
        yield
        await relaying.close()

    app.on_response_prepare.append(show_load)
    app.cleanup_ctx.append(relay)
    app.add_routes(
        [
            web.post("/v1/completions", computation.handle),
            web.post("/v1/chat/completions", computation.handle),
            web.post("/generate", computation.handle),
            web.put("/generate", computation.handle),
            web.post(SEQUENCE_PATH, path.handle),
            *surface.routes(),
        ]
    )
    return app


async def serve(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Listen; `cleanup()` of what is returned ends it. Port 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the host is no address of this machine.
    """
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        logger=server_logger(),
        # A client that leaves ends its request at once, also while no token comes.
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=KEEP_ALIVE_SECONDS,
    )
    await runner.setup()
    try:
        connections = app.get(CONNECTIONS) or Connections()
        await BoundedSite(runner, host, port, connections=connections).start()
    except OSError as error:
        await runner.cleanup()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"http_port {port} on {host} is taken by another process; stop that process or"
                " choose another port"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return runner


@web.middleware
async def errors_have_one_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON in OpenAI's shape, those of the HTTP library too."""
    try:
        return await handler(request)
    except PDClusterError as error:
        return error_answer(error)
    except ConnectionError:
        # The client left or takes nothing, which is no fault of ours. What it has read of a stream
        # must not be followed by another answer, so the connection ends first.
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)
    except web.HTTPRequestEntityTooLarge:
        bound = Limits().body_bytes_max
        return refuse(
            Reason.TOO_LARGE, f"the body is over the limit of {bound} bytes; send less", status=413
        )
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        answer = refuse(
            Reason.INVALID_REQUEST,
            f"{request.method} is not allowed on {request.path}; use {allowed}",
            status=405,
        )
        answer.headers["Allow"] = allowed
        return answer
    except web.HTTPError as error:
        return refuse(
            Reason.INVALID_REQUEST,
            f"{request.method} {request.path[:128]}: {error.reason}",
            status=error.status,
        )
