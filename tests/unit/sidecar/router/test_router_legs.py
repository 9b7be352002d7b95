"""Leg connections against a scripted server: used again, held back, drained, lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdcluster_protocol.authentication import HEADER, HttpSigner, HttpVerifier
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import RankAddress
from pdcluster_sidecar.router.legs import IDLE_SECONDS, LegPool
from support.canned import DEADLINE_SECONDS, RING
from support.ports import fresh_host

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
PATH = "/v1/completions"


class Script:
    """A server that writes what a test says, and counts connections and requests."""

    def __init__(self) -> None:
        self.address = RankAddress("", 0)
        self.reply = OK
        self.connections = 0
        self.requests: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                writer.write(self.reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class Heard:
    """A leg's listener that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ended = asyncio.Event()
        self.lost: tuple[Reason, str] | None = None

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def on_part(self, part: bytes) -> None:
        self.body += part

    def on_fed(self) -> None:
        pass

    def on_end(self) -> None:
        assert not self.ended.is_set()
        self.ended.set()

    def on_lost(self, reason: Reason, detail: str) -> None:
        assert not self.ended.is_set()
        self.lost = reason, detail
        self.ended.set()

    async def wait(self) -> Heard:
        await asyncio.wait_for(self.ended.wait(), DEADLINE_SECONDS)
        return self


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 0.0


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Script, LegPool, Clock]]:
    script, clock = Script(), Clock()
    host = fresh_host()
    server = await asyncio.start_server(script.serve, host, 0)
    script.address = RankAddress(host, server.sockets[0].getsockname()[1])
    pool = LegPool(HttpSigner(RING, "router"), now=lambda: clock.at)
    try:
        yield script, pool, clock
    finally:
        await pool.close()
        server.close()
        for writer in script.writers:
            writer.close()
        await server.wait_closed()


async def ask(script: Script, pool: LegPool, body: bytes = b"{}") -> Heard:
    heard = Heard()
    pool.post(script.address, PATH, body, heard)
    return await heard.wait()


async def test_every_leg_is_signed_anew_on_one_connection() -> None:
    async with served() as (script, pool, _):
        for number in range(3):
            heard = await ask(script, pool, b"%d" % number)
            assert (200, b"ok", None) == (heard.status, heard.body, heard.lost)

        assert 1 == script.connections
        verifier = HttpVerifier(RING)
        for raw in script.requests:
            head, _, body = raw.partition(b"\r\n\r\n")
            marked = f"{HEADER}: ".encode()
            signature = head.split(marked)[1].split(b"\r\n")[0].decode()
            assert "router" == verifier.verify(
                signature, "POST", PATH, body, authorities=(str(script.address),)
            )


async def test_a_large_body_arrives_whole() -> None:
    async with served() as (script, pool, _):
        body = b"x" * 3_000_000
        assert 200 == (await ask(script, pool, body)).status

        assert script.requests[0].endswith(body)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"nonsense\r\n\r\n", Reason.WIRE_ERROR),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", Reason.WIRE_ERROR),
    ],
)
async def test_an_answer_that_is_no_http_is_lost_and_its_connection_with_it(
    reply: bytes, reason: Reason
) -> None:
    async with served() as (script, pool, _):
        script.reply = reply
        heard = await ask(script, pool)
        assert heard.lost is not None
        assert reason is heard.lost[0]

        script.reply = OK
        assert 200 == (await ask(script, pool)).status
        assert 2 == script.connections


async def test_a_connection_that_closes_inside_an_answer_is_lost_once() -> None:
    async with served() as (script, pool, _):
        script.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"
        heard = Heard()
        pool.post(script.address, PATH, b"{}", heard)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while heard.body != b"half":
                await asyncio.tasks.sleep(0)
        script.writers[0].transport.abort()

        await heard.wait()
        assert heard.lost is not None
        assert Reason.ENGINE_DIED is heard.lost[0]
        assert 1 == len(script.requests)


@pytest.mark.parametrize("host", ["", "a..b", "x" * 70], ids=["nobody listens", "dots", "long"])
async def test_where_nobody_can_listen_is_unreachable(host: str) -> None:
    async with served() as (script, pool, _):
        script.address = RankAddress(host or script.address.host, 1)
        heard = await ask(script, pool)

        assert heard.lost is not None
        assert Reason.PEER_UNREACHABLE is heard.lost[0]
        assert str(script.address) in heard.lost[1]


async def test_an_interim_answer_is_no_answer() -> None:
    async with served() as (script, pool, _):
        script.reply = b"HTTP/1.1 100 Continue\r\n\r\n" + OK

        assert (200, b"ok") == ((heard := await ask(script, pool)).status, heard.body)
        assert 200 == (await ask(script, pool)).status


async def test_a_server_that_wants_to_close_is_obeyed() -> None:
    async with served() as (script, pool, _):
        script.reply = OK.replace(b"content-length", b"connection: close\r\ncontent-length")
        for _ in range(2):
            assert 200 == (await ask(script, pool)).status

        assert 2 == script.connections


async def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    async with served() as (script, pool, _):
        await ask(script, pool)
        script.writers[0].write(OK)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await script.writers[0].wait_closed()

        assert 200 == (await ask(script, pool)).status
        assert 2 == script.connections


async def test_a_cancelled_leg_closes_its_connection_and_says_nothing() -> None:
    async with served() as (script, pool, _):
        script.reply = b""
        heard = Heard()
        leg = pool.post(script.address, PATH, b"{}", heard)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not script.requests:
                await asyncio.tasks.sleep(0)
            leg.cancel()
            await script.writers[0].wait_closed()

        assert not heard.ended.is_set()


async def test_a_leg_that_is_cancelled_before_it_is_sent_is_never_sent() -> None:
    async with served() as (script, pool, _):
        heard = Heard()
        pool.post(script.address, PATH, b"first", heard).cancel()
        assert 200 == (await ask(script, pool, b"second")).status

        assert not heard.ended.is_set()
        assert [b"second"] == [raw.rpartition(b"\r\n\r\n")[2] for raw in script.requests]


async def test_a_drained_leg_ends_unheard_and_leaves_its_connection() -> None:
    async with served() as (script, pool, _):
        script.reply = b""
        heard = Heard()
        leg = pool.post(script.address, PATH, b"{}", heard)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not script.requests:
                await asyncio.tasks.sleep(0)
        leg.drain(seconds=DEADLINE_SECONDS)
        script.reply = OK
        script.writers[0].write(OK)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while pool.idle_count == 0:
                await asyncio.tasks.sleep(0)

        assert 200 == (await ask(script, pool)).status
        assert 1 == script.connections
        assert not heard.ended.is_set()


async def test_a_leg_may_be_held_back_before_its_connection_stands() -> None:
    async with served() as (script, pool, _):
        held = Heard()
        leg = pool.post(script.address, PATH, b"{}", held)
        leg.hold(held=True)
        # Another leg to the same engine is answered meanwhile: time has passed for both.
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(script.requests) < 1:
                await asyncio.tasks.sleep(0)
        for _ in range(3):
            assert 200 == (await ask(script, pool)).status
        assert b"" == held.body

        leg.hold(held=False)
        assert b"ok" == (await held.wait()).body


async def test_idle_connections_are_closed_before_servers_close_them() -> None:
    async with served() as (script, pool, clock):
        await ask(script, pool)
        clock.at = IDLE_SECONDS - 0.1
        pool.sweep()
        assert 1 == pool.idle_count

        clock.at = IDLE_SECONDS
        pool.sweep()
        assert 0 == pool.idle_count
