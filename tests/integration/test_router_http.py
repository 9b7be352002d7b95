"""The byte path in, byte by byte: what HTTP allows is served, what it forbids is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pdcluster_protocol.ids import Role
from support.canned import DEADLINE_SECONDS, Leg, World, answer, hang_up, stream_then, world

BODY = b'{"prompt":"hello","seed":1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class RawClient:
    """A client that sends what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), DEADLINE_SECONDS)
        first, *lines = raw.decode("latin-1").strip().split("\r\n")
        return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in lines)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer with a length."""
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["content-length"]))
        return status, headers, body

    async def rest(self) -> bytes:
        """Everything until the router closes."""
        return await asyncio.wait_for(self.reader.read(), DEADLINE_SECONDS)


@asynccontextmanager
async def connected(here: World) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", here.router.port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def post(body: bytes = BODY, *, head: bytes = HEAD) -> bytes:
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


async def test_a_connection_serves_one_request_after_another(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        for _ in range(3):
            client.send(post())
            assert 200 == (await client.answer())[0]


async def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        bodies = [b'{"prompt":"hello","seed":%d}' % seed for seed in range(40)]
        client.send(b"".join(post(body) + GET for body in bodies))

        for seed in range(40):
            _, _, body = await client.answer()
            assert f"5/{seed}" == json.loads(body)["choices"][0]["text"]
            assert b"OK" == (await client.answer())[2]


async def test_too_many_pipelined_requests_end_the_connection(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def wait(leg: Leg, request: web.Request) -> web.StreamResponse:
        await released.wait()
        return await answer(leg, request)

    async with world(tmp_path) as here, connected(here) as client:
        here.decode.behaviour = wait
        client.send(post() + GET * 2000)
        await here.decode.wait_for(lambda: bool(here.decode.legs))
        released.set()

        answers = [await client.answer()]
        while answers[-1][1].get("connection") != "close":
            answers.append(await client.answer())
        assert [200] * 256 + [429] == [status for status, _, _ in answers]
        assert b"" == await client.rest()


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_request_may_come_in_pieces_of_any_size(tmp_path: Path, size: int) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        raw = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        raw += b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
        for start in range(0, len(raw), size):
            client.send(raw[start : start + size])
            await client.writer.drain()

        assert 200 == (await client.answer())[0]


async def test_http_1_0_gets_a_stream_without_chunks_that_ends_with_the_connection(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(
            post(b'{"prompt":"hello","stream":true}', head=b"POST /v1/completions HTTP/1.0\r\n")
        )

        status, headers = await client.head()
        assert (200, "close") == (status, headers["connection"])
        assert "transfer-encoding" not in headers
        text = await client.rest()
        assert text.startswith(b"data: {")
        assert text.endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_broke_ends_its_connection_properly(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        here.decode.behaviour = stream_then(events=1, end=hang_up)
        client.send(post(b'{"prompt":"hello","stream":true}') + GET)

        await client.head()
        rest = await client.rest()
        # The last chunk is there, and the next request is not answered on this connection.
        assert rest.endswith(b"\r\n0\r\n\r\n")
        assert b"EngineDied" in rest


async def test_http_1_0_is_kept_alive_for_plain_answers_only(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        old = b"POST /v1/completions HTTP/1.0\r\nconnection: keep-alive\r\n"
        client.send(post(head=old))
        status, headers, _ = await client.answer()
        assert (200, "keep-alive") == (status, headers["connection"])

        client.send(post(b'{"prompt":"hello","stream":true}', head=old))
        assert "close" == (await client.head())[1]["connection"]
        assert (await client.rest()).endswith(b"data: [DONE]\n\n")


async def test_a_stream_to_http_1_1_is_chunked_and_the_connection_stays(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(post(b'{"prompt":"hello","stream":true}'))
        _, headers = await client.head()
        assert "chunked" == headers["transfer-encoding"]
        raw = await client.reader.readuntil(b"\r\n0\r\n\r\n")
        assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

        client.send(GET)
        assert 200 == (await client.answer())[0]


async def test_a_body_is_invited_where_the_client_waits_for_it(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert 100 == (await client.head())[0]
        client.send(BODY)
        assert 200 == (await client.answer())[0]


async def test_a_body_that_is_too_large_is_refused_instead_of_invited(tmp_path: Path) -> None:
    async with world(tmp_path, body_bytes_max=1000) as here, connected(here) as client:
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 1001\r\n\r\n")

        status, headers, body = await client.answer()
        assert (413, "close") == (status, headers["connection"])
        assert "TooLarge" == json.loads(body)["error"]["code"]
        assert b"" == await client.rest()


async def test_a_chunked_body_is_measured_while_it_comes(tmp_path: Path) -> None:
    async with world(tmp_path, body_bytes_max=1000) as here, connected(here) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            client.send(b"64\r\n%b\r\n" % (b"x" * 100))

        assert 413 == (await client.answer())[0]
        assert [] == here.legs(Role.DECODE)


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"x: %b\r\n\r\n" % (b"y" * 40_000),
        HEAD + b"".join(b"x%d: y\r\n" % number for number in range(200)) + b"\r\n",
    ],
)
async def test_headers_are_bounded(tmp_path: Path, raw: bytes) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(raw)

        assert 431 == (await client.answer())[0]


async def test_a_header_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(HEAD + b"x: ")
        refused = asyncio.create_task(client.answer())
        for _ in range(1000):
            client.send(b"y" * 1000)
            await client.writer.drain()
            if refused.done():
                break

        assert 431 == (await refused)[0]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"DELETE /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET http://x/health?a=b HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 200),
    ],
)
async def test_paths_and_methods_are_told_apart(tmp_path: Path, raw: bytes, status: int) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(raw)

        assert status == (await client.answer())[0]


async def test_a_head_request_gets_no_body(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ("2", 200) == ((answer := await client.head())[1]["content-length"], answer[0])

        client.send(GET)
        assert b"OK" == (await client.answer())[2]


async def test_a_client_that_wants_to_close_is_obeyed(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(post(head=HEAD + b"connection: close\r\n"))

        assert "close" == (await client.answer())[1]["connection"]
        assert b"" == await client.rest()


async def test_what_looks_like_a_header_in_an_echo_stays_text(tmp_path: Path) -> None:
    async with world(tmp_path) as here, connected(here) as client:
        client.send(post(b'{"prompt":"hello","rid":"a\\r\\nx-evil: 1"}'))

        _, headers, _ = await client.answer()
        assert "x-evil" not in headers
        assert "x-client-request-id" not in headers
