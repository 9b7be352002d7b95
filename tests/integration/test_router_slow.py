"""Clients that send or read slowly, or not at all: each gets its end, and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Role
from pdcluster_protocol.limits import Timeouts
from pdcluster_sidecar.router.listening import ServeLimits
from support.canned import Leg, World, answer, begin_stream, never, world
from support.router_process import RawSocket, RouterProcess

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"prompt":"hello","seed":1}'
STREAM = b'{"prompt":"hello","stream":true}'
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LIMITS = ServeLimits(
    body_bytes_max=1 << 20, head_seconds=0.2, body_seconds=0.4, idle_seconds=0.6, sweep_seconds=0.05
)
EVENT = b'data: {"choices": [{"text": "%b"}]}\n\n' % (b"x" * 60_000)
STALL_SECONDS = 2
CROWD = 8
GROWTH_BYTES_MAX = 32 << 20
STILL_LOOKS = 3
"""A busy machine may pause a process for the time between two looks."""
HELD_BYTES_MAX = 10 << 20
"""What kernel buffers on both sides and the router hold of one stream that nobody reads."""


def post(body: bytes) -> bytes:
    return b"%bcontent-length: %d\r\n\r\n%b" % (POST, len(body), body)


@contextlib.asynccontextmanager
async def impatient(folder: Path) -> AsyncIterator[World]:
    """A router that waits for tenths of seconds where others wait for seconds."""
    async with world(folder, limits=LIMITS) as here:
        yield here


async def ends(here: World, raw: bytes) -> bytes:
    """All that comes back, until the router closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.router.port)
    writer.write(raw)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"P", "the head of the request did not arrive within 0.2 s"),
        (b"POST /v1/compl", "the head of the request did not arrive within 0.2 s"),
        (POST + b"x: ", "the head of the request did not arrive within 0.2 s"),
        (post(BODY)[:-1], "the body did not arrive within 0.4 s"),
        (POST + b"transfer-encoding: chunked\r\n\r\n1", "the body did not arrive within 0.4 s"),
        (POST + b"transfer-encoding: chunked\r\n\r\n1b\r\n{", "the body did not arrive"),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: y\r\n", "the body did not arrive"),
    ],
)
async def test_a_request_that_does_not_arrive_gets_408_and_the_end(
    tmp_path: Path, raw: bytes, what: str
) -> None:
    async with impatient(tmp_path) as here:
        # The one before it is answered; the clock is that of the second.
        said = await ends(here, GET + raw)

        first, second = said.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"200 ")
        assert second.startswith(b"408 ")
        assert b"connection: close" in second
        assert what.encode() in second
        assert [] == here.legs(Role.DECODE)


async def test_a_byte_now_and_then_buys_no_time(tmp_path: Path) -> None:
    async with impatient(tmp_path) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.router.port)
        writer.write(POST + b"x: ")
        ended = asyncio.create_task(reader.read())
        trickled = 0
        while not ended.done():
            # A header that is never finished: the parser keeps it to itself.
            writer.write(b"y")
            trickled += 1
            assert trickled < 200
            await asyncio.wait([ended], timeout=0.05)

        assert (await ended).startswith(b"HTTP/1.1 408 ")
        writer.transport.abort()


async def test_a_connection_without_a_request_is_closed_without_a_word(tmp_path: Path) -> None:
    async with impatient(tmp_path) as here:
        assert b"" == await ends(here, b"")
        assert (await ends(here, GET)).endswith(b"OK")


async def test_what_waits_behind_a_long_answer_is_not_late(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def wait(leg: Leg, request: web.Request) -> web.StreamResponse:
        await released.wait()
        return await answer(leg, request)

    async with impatient(tmp_path) as here:
        here.decode.behaviour = wait
        reader, writer = await asyncio.open_connection("127.0.0.1", here.router.port)
        # So many that the router stops reading: what it has not read cannot be late.
        writer.write(post(BODY) + GET * 3000 + POST)
        await here.decode.wait_for(lambda: bool(here.decode.legs))
        passed = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.6, passed.set_result, None)
        await passed
        released.set()

        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert first.startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()


async def test_a_crowd_of_slow_senders_delays_nobody(tmp_path: Path) -> None:
    async with impatient(tmp_path) as here:
        crowd = [asyncio.create_task(ends(here, POST + b"x: ")) for _ in range(100)]

        said = await ends(here, post(BODY).replace(b"host: x", b"host: x\r\nconnection: close"))

        assert said.startswith(b"HTTP/1.1 200 ")
        assert 100 == sum(b" 408 " in each for each in await asyncio.gather(*crowd))


# --- clients that read slowly -------------------------------------------------------------------


class Flood:
    """Streams that are longer than anything wants to hold."""

    def __init__(self, event_count: int) -> None:
        self.event_count = event_count
        self.written = 0

    async def __call__(self, leg: Leg, request: web.Request) -> web.StreamResponse:
        if not leg.stream:
            return await answer(leg, request)
        response = await begin_stream(request)
        for _ in range(self.event_count):
            await response.write(EVENT)
            self.written += len(EVENT)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def wait_held(self) -> None:
        """Wait until nothing more is taken."""
        turned = threading.Event()
        before, still = -1, 0
        for _ in range(100):
            still = still + 1 if 0 < self.written == before else 0
            if still == STILL_LOOKS:
                return
            before = self.written
            turned.wait(0.2)
        raise AssertionError(f"still written after 20 s: {self.written} bytes")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    timeouts = Timeouts(queue_seconds=5, bootstrap_seconds=5, stall_seconds=STALL_SECONDS)
    folder = tmp_path_factory.mktemp("router")
    with RouterProcess(folder, timeouts=timeouts).running() as process:
        yield process


def test_a_reader_that_pauses_gets_every_byte(router: RouterProcess) -> None:
    flood = Flood(event_count=400)
    router.behave(flood)
    with router.connect() as client:
        client.send(post(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        flood.wait_held()
        assert flood.written < HELD_BYTES_MAX

        body = client.rest().partition(b"\r\n\r\n")[2]
    assert 400 * len(EVENT) + len(b"data: [DONE]\n\n") == len(body)
    assert body.endswith(b"data: [DONE]\n\n")


def test_readers_that_stop_are_held_back_named_and_dropped_while_others_are_served(
    router: RouterProcess,
) -> None:
    decode = router.worker(Role.DECODE)
    flood = Flood(event_count=10_000)
    router.behave(flood)
    before, seen, aborted = router.rss_bytes(), len(decode.legs), len(decode.aborts)
    with contextlib.ExitStack() as stack:
        stuck = [stack.enter_context(router.connect()) for _ in range(CROWD)]
        for client in stuck:
            client.send(post(STREAM))
        flood.wait_held()
        legs = decode.legs[seen:]
        assert CROWD == len(legs)
        assert flood.written < CROWD * HELD_BYTES_MAX
        assert router.rss_bytes() - before < GROWTH_BYTES_MAX
        ask(router.connect())

        router.wait(Role.DECODE, lambda: len(decode.aborts) >= aborted + CROWD)
        assert {Reason.CLIENT_GONE} == {abort.reason for abort in decode.aborts[aborted:]}
        router.wait(Role.DECODE, lambda: all(leg.gone.is_set() for leg in legs))
    ask(router.connect())


def test_an_answer_that_nobody_waits_for_ends_with_its_client(router: RouterProcess) -> None:
    router.behave(never)
    decode = router.worker(Role.DECODE)
    seen, aborted = len(decode.legs), len(decode.aborts)
    with router.connect() as client:
        client.send(post(BODY))
        router.wait(Role.DECODE, lambda: len(decode.legs) > seen)
    router.wait(Role.DECODE, lambda: len(decode.aborts) > aborted)
    router.behave(answer)
    ask(router.connect())


def ask(client: RawSocket) -> None:
    """Somebody else's request, which must be answered."""
    with client:
        client.send(post(BODY))
        assert 200 == client.answer().status
