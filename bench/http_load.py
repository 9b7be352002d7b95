"""A closed loop of prepared HTTP requests over kept-alive connections; it costs little itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httptools
import msgspec

ANSWER_SECONDS = 30.0


class Load(msgspec.Struct):
    """What came back."""

    seconds: float = 0.0
    statuses: dict[int, int] = {}

    @property
    def count(self) -> int:
        return sum(self.statuses.values())

    @property
    def rate(self) -> float:
        return self.count / self.seconds


class _Connection(asyncio.Protocol):
    def __init__(self, requests: Iterator[bytes], load: Load, done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._load = load
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def start(self) -> None:
        """Send the first request."""
        self._next()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._load.statuses[status] = self._load.statuses.get(status, 0) + 1
        # The parser is inside a feed: the next request must not re-enter it.
        asyncio.get_running_loop().call_soon(self._next)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed: {exc}"))

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._transport.write(request)
        elif not self._done.done():
            self._done.set_result(None)
            self._transport.close()


async def drive(address: tuple[str, int], requests: Iterable[bytes], *, connections: int) -> Load:
    """Send them all, `connections` at a time, each once."""
    loop = asyncio.get_running_loop()
    load = Load(statuses={})
    source = iter(requests)
    ends = [loop.create_future() for _ in range(connections)]
    opened = []
    for done in ends:
        _, connection = await loop.create_connection(
            lambda done=done: _Connection(source, load, done), *address
        )
        opened.append(connection)
    # What it takes to connect is no part of the load.
    started = time.perf_counter()
    for connection in opened:
        connection.start()
    async with asyncio.timeout(ANSWER_SECONDS):
        await asyncio.gather(*ends)
    load.seconds = time.perf_counter() - started
    return load
