"""Bodies have a bound together and a deadline each, and give back what they took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from pdcluster_protocol.errors import Overloaded, WireError
from pdcluster_sidecar.bodies import Bodies

DEADLINE_SECONDS = 20.0
BYTES_MAX = 1000


@asynccontextmanager
async def serving(bodies: Bodies) -> AsyncIterator[Callable[[bytes], Awaitable[Client]]]:
    """A server that answers with the length of a body, or with the kind of its refusal."""
    application = web.Application(client_max_size=BYTES_MAX)

    async def handle(request: web.Request) -> web.Response:
        try:
            async with bodies.read(request) as body:
                assert body == await request.read()
                return web.Response(text=f"<{len(body)}>")
        except (Overloaded, WireError, web.HTTPRequestEntityTooLarge) as error:
            return web.Response(text=f"<{type(error).__name__}>")

    application.router.add_post("/", handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    clients: list[Client] = []

    async def client(raw: bytes) -> Client:
        clients.append(Client(*await asyncio.open_connection(*runner.addresses[0][:2])))
        clients[-1].writer.write(raw)
        return clients[-1]

    try:
        yield client
    finally:
        for each in clients:
            each.writer.transport.abort()
        await runner.cleanup()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> str:
        async with asyncio.timeout(DEADLINE_SECONDS):
            raw = await self.reader.readuntil(b">")
        return raw.rpartition(b"<")[2][:-1].decode()


def post(announced: int, body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % announced + body


async def until_held(bodies: Bodies, nbytes: int) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while bodies.held_bytes != nbytes:
            await asyncio.sleep(0)


async def test_what_has_arrived_of_all_bodies_is_bounded_and_given_back() -> None:
    bodies = Bodies(bytes_max=BYTES_MAX)
    async with serving(bodies) as client:
        holder = await client(post(900, b"x" * 800))
        await until_held(bodies, 800)
        assert "Overloaded" == await (await client(post(300, b"y" * 300))).answer()
        assert "200" == await (await client(post(200, b"y" * 200))).answer()

        holder.writer.transport.abort()
        await until_held(bodies, 0)
        assert "300" == await (await client(post(300, b"y" * 300))).answer()
        assert "HTTPRequestEntityTooLarge" == await (await client(post(1001, b"z" * 1001))).answer()
        assert 0 == bodies.held_bytes


async def test_a_body_that_trickles_is_cut_off() -> None:
    bodies = Bodies(seconds=0.1)
    async with serving(bodies) as client:
        assert "WireError" == await (await client(post(900, b"x"))).answer()
        assert 0 == bodies.held_bytes
