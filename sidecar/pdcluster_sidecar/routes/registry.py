"""SGLang's bootstrap paths over `RegistryNode`, with its codes and texts.

Plain requests to `/route` do not come here: `route_path` answers them.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from pdcluster_protocol.push.registry import Answer, RegistryNode

PATHS: Final = frozenset({"/route", "/register_dp_rank", "/query_dp_ranks"})
# Finished headers save the library from parsing and joining them for every answer.
_JSON: Final = CIMultiDictProxy(CIMultiDict({"Content-Type": "application/json; charset=utf-8"}))
_PLAIN: Final = CIMultiDictProxy(CIMultiDict({"Content-Type": "text/plain; charset=utf-8"}))


def add(app: web.Application, registry: RegistryNode) -> None:
    """Register the paths."""

    async def route(request: web.Request) -> web.Response:
        match request.method:
            case "PUT":
                return _response(registry.put_route(await request.read()))
            case "GET":
                return _response(registry.get_route(request.query))
            case _:
                # SGLang answers this text under a JSON content type, and so do we.
                return web.Response(
                    status=405, text="Method not allowed", content_type="application/json"
                )

    async def register_dp_rank(request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        return _response(registry.register_dp_rank(await request.read(), now))

    async def query_dp_ranks(request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        return _response(registry.query_dp_ranks(await request.read(), now))

    app.router.add_route("*", "/route", route)
    app.router.add_post("/register_dp_rank", register_dp_rank)
    app.router.add_post("/query_dp_ranks", query_dp_ranks)


def _response(answer: Answer) -> web.Response:
    return web.Response(
        status=answer.status, body=answer.text.encode(), headers=_JSON if answer.json else _PLAIN
    )
