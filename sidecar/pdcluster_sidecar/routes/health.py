"""`/health`, `/ready` and `/metrics`: open to everybody, and free of secrets."""

from __future__ import annotations

import msgspec
from aiohttp import web

from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.telemetry import CONTENT_TYPE, Metrics


def add(app: web.Application, ranks: Ranks, metrics: Metrics) -> None:
    """Register the paths."""

    async def health(_: web.Request) -> web.Response:
        # SGLang's heartbeat asks this of a registry: it says that we listen, and nothing else.
        return web.Response(text="OK")

    async def ready(_: web.Request) -> web.Response:
        why = ranks.unready()
        content = {"ready": not why, "detail": why, "incarnation": ranks.instance.incarnation}
        return web.Response(
            status=503 if why else 200,
            body=msgspec.json.encode(content),
            content_type="application/json",
        )

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"content-type": CONTENT_TYPE})

    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", exposition)
