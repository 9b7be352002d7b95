"""What many, slow or greedy clients of an engine cost: something bounded, and nobody's turn."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import aiohttp
import pytest
import pytest_asyncio

from pdcluster_engine.http.bodies import Bodies
from pdcluster_engine.http.connections import Connections
from pdcluster_engine.submission import Submission
from pdcluster_protocol.callers import BUSY
from pdcluster_protocol.limits import Limits
from support.scripted_engine import WAIT_SECONDS, ScriptedEngine, Step, serving, spell

SMALL_BYTES_MAX = 100_000
SHORT_SECONDS = 0.2
FEW = 4


def answering() -> ScriptedEngine:
    return ScriptedEngine(lambda submission: spell("abcdef", submission))


class Client:
    """A raw connection that sends what it is told, and nothing more."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def open(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def send(self, raw: bytes) -> Client:
        self.writer.write(raw)
        await self.writer.drain()
        return self

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await self.reader.read()

    def leave(self) -> None:
        self.writer.transport.abort()


Clients = Callable[[str], Awaitable[Client]]


@pytest_asyncio.fixture
async def clients() -> AsyncIterator[Clients]:
    """Opens raw connections and closes them at the end."""
    opened: list[Client] = []

    async def open_client(address: str) -> Client:
        opened.append(await Client(address).open())
        return opened[-1]

    yield open_client
    for client in opened:
        client.leave()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


def head(length: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length


async def status_of(address: str, body: bytes) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(address) as client,
        client.post("/v1/completions", data=io.BytesIO(body)) as answer,
    ):
        return answer.status, answer.headers.get("x-pd-reason", "")


async def until_status(address: str, body: bytes, status: int) -> None:
    """Ask again until the answer has this status, with a deadline."""
    async with asyncio.timeout(WAIT_SECONDS):
        while (await status_of(address, body))[0] != status:
            await asyncio.sleep(0)


async def test_bodies_on_their_way_have_a_bound_together_and_the_next_one_fits_again(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    monkeypatch.setattr(
        "pdcluster_engine.http.door.Bodies", partial(Bodies, bytes_max=SMALL_BYTES_MAX)
    )
    small = b'{"prompt": "a", "max_tokens": 2}'
    large = b'{"prompt": "a", "max_tokens": 2, "user": "%s"}' % (b"u" * (SMALL_BYTES_MAX // 2))
    async with serving(answering()) as address:
        holder = await clients(address)
        await holder.send(head(SMALL_BYTES_MAX) + b" " * (SMALL_BYTES_MAX * 3 // 4))
        await until_status(address, large, 429)
        assert (429, "Overloaded") == await status_of(address, large)
        assert 200 == (await status_of(address, small))[0]

        holder.leave()
        await until_status(address, large, 200)


async def test_every_ended_request_gives_its_bytes_back() -> None:
    bodies = Bodies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdcluster_engine.http.door.Bodies", lambda: bodies)
        async with serving(answering()) as address:
            too_large = b" " * (Limits().body_bytes_max + 1)
            for body, status in ((b'{"prompt": "a"}', 200), (b"{", 400), (too_large, 413)):
                assert status == (await status_of(address, body))[0]
                assert 0 == bodies.held_bytes


async def test_a_body_that_trickles_is_cut_off_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    monkeypatch.setattr("pdcluster_engine.http.door.Bodies", partial(Bodies, seconds=SHORT_SECONDS))
    async with serving(answering()) as address:
        slow = await clients(address)
        await slow.send(head(1000) + b"{")
        async with asyncio.timeout(WAIT_SECONDS):
            answer = await slow.reader.readuntil(b"send it faster")
        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_idle_connections_make_room_for_new_ones(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    connections = Connections(connections_max=FEW)
    monkeypatch.setattr("pdcluster_engine.http.app.Connections", lambda: connections)
    async with serving(answering()) as address:
        idle = [await clients(address) for _ in range(FEW)]
        # Half a head is no request.
        await idle[0].send(head(5)[:-2])
        for number in range(3 * FEW):
            assert 200 == (await status_of(address, b'{"prompt": "a"}'))[0], number
        assert b"" == await idle[0].rest()
        # Later newcomers left by themselves.
        assert 1 == connections.callers.closed


async def test_who_was_answered_last_is_not_the_first_to_make_room(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    connections = Connections(connections_max=FEW)
    monkeypatch.setattr("pdcluster_engine.http.app.Connections", lambda: connections)
    async with serving(answering()) as address, aiohttp.ClientSession(address) as kept:
        for number in range(3 * FEW):
            async with kept.get("/health") as answer:
                assert 200 == answer.status
            await clients(address)
            assert max(0, number + 2 - FEW) == connections.callers.closed


async def test_while_all_are_being_answered_a_newcomer_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    connections = Connections(connections_max=FEW)
    monkeypatch.setattr("pdcluster_engine.http.app.Connections", lambda: connections)
    gate = threading.Event()

    def wait(submission: Submission) -> list[Step]:
        return [gate, *spell("ab", submission)]

    engine = ScriptedEngine(wait)
    async with serving(engine) as address:
        body = b'{"prompt": "a"}'
        busy = [asyncio.create_task(status_of(address, body)) for _ in range(FEW)]
        await asyncio.to_thread(engine.wait_for_submissions, FEW)
        assert BUSY == await (await clients(address)).rest()
        gate.set()
        assert [200] * FEW == [(await each)[0] for each in busy]
        assert (0, 1) == (connections.callers.closed, connections.callers.refused)
