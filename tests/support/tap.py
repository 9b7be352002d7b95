"""A wire tap between somebody's router and one of our engines.

It listens on the engine's own host, so a `bootstrap_host` that a router takes from the worker's URL
stays right; passes bytes on as they come, in both directions; and records what was asked and
answered. A test hangs a `Rule` in to make an order of events certain that chance would rarely give.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
from aiohttp import web

HOP_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
TIMEOUT = aiohttp.ClientTimeout(total=110)
END_SECONDS = 1.0


class Seen:
    """One request that came by, and its answer as far as it has come."""

    def __init__(self, request: web.Request, body: bytes) -> None:
        self.method = request.method
        self.path = request.path
        self.target = request.raw_path
        self.body: dict[str, Any] = json.loads(body) if body else {}
        self.raw = body
        self.status = 0
        """0 until the engine has answered."""
        self.reason = ""
        self.ended = asyncio.Event()

    @property
    def leg(self) -> bool:
        return "bootstrap_room" in self.body

    @property
    def rooms(self) -> list[int]:
        """The rooms of a leg; a batch has several."""
        room = self.body["bootstrap_room"]
        return list(room) if isinstance(room, list) else [room]


Rule = Callable[[Seen], Awaitable[None]]
"""Awaited before a leg is passed on."""


class Tap:
    """The tap of one engine; `rule` is asked for every leg while it is set."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self.seen: list[Seen] = []
        self.probed: dict[str, int] = {}
        """Every path that was asked by GET since the start, with its last status."""
        self.rule: Rule | None = None
        self._session: aiohttp.ClientSession

    @property
    def legs(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.leg]

    def forget(self) -> None:
        """Start a new record."""
        self.seen.clear()

    @contextlib.contextmanager
    def ruled(self, rule: Rule) -> Iterator[None]:
        """Ask `rule` for every leg inside the block."""
        self.rule = rule
        try:
            yield
        finally:
            self.rule = None

    @contextlib.asynccontextmanager
    async def copies(self) -> AsyncIterator[Callable[[Seen], None]]:
        """A function that sends a leg's bytes once more, on a connection of its own.

        Leaving the block closes those that have got no answer by then.
        """
        tasks: list[asyncio.Task[None]] = []
        yield lambda seen: tasks.append(asyncio.create_task(self._copy(seen)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(self, seen: Seen) -> None:
        async with self._session.request(
            seen.method, self.target + seen.target, data=seen.raw, headers=_json_headers()
        ) as answer:
            await answer.read()

    @contextlib.asynccontextmanager
    async def listening(self, host: str) -> AsyncIterator[Tap]:
        """Listen on a free port of this host."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=END_SECONDS)
        async with aiohttp.ClientSession(timeout=TIMEOUT) as self._session:
            await runner.setup()
            await web.TCPSite(runner, host, 0).start()
            self.url = f"http://{host}:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request, await request.read())
        self.seen.append(seen)
        try:
            if seen.leg and self.rule is not None:
                await self.rule(seen)
            return await self._answer(request, seen)
        except ConnectionResetError:
            # A rule has cut the connection, or the router has gone.
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            seen.ended.set()

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        async with self._session.request(
            seen.method, self.target + seen.target, data=seen.raw or None, headers=headers
        ) as answer:
            seen.status = answer.status
            if seen.method == "GET":
                self.probed[seen.path] = seen.status
            seen.reason = answer.headers.get("x-pd-reason", "")
            response = web.StreamResponse(status=answer.status)
            response.headers.update(
                {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


def _json_headers() -> dict[str, str]:
    return {"content-type": "application/json"}
