"""A closed loop of clients on bare protocols: as cheap as it can be, since it shares two cores.

One request costs it some 6 us of CPU (a hundredth of what is measured costs more), because it sends
the same bytes again and looks only at status and length of what comes back.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httptools
import msgspec

from bench.figures import percentile


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of load."""

    name: str
    connections: int
    stream: str = ""
    """Empty: plain answers. Else the model's name, by which the canned engine knows the pace."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of one shape showed of one way."""

    requests_per_second: float
    events_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_request: float
    cpu_us_per_event: float
    failed: int


class Client(asyncio.Protocol):
    """Sends the same request again as soon as it is answered."""

    def __init__(self, request: bytes, loop_of_clients: Loop) -> None:
        self._request = request
        self._loop = loop_of_clients
        self._parser = httptools.HttpResponseParser(self)
        self._sent_at = 0.0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        self._loop.body_bytes += len(part)

    def on_message_complete(self) -> None:
        loop = self._loop
        loop.failed += self._parser.get_status_code() != 200
        loop.seconds.append(time.perf_counter() - self._sent_at)
        if not loop.over:
            # The parser is inside a feed: the next request must not re-enter it.
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)


class Loop:
    """What the clients of one run have seen together."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.body_bytes = 0
        self.failed = 0
        self.over = False


async def drive(
    address: tuple[str, int], shape: Shape, *, pid: int | None, seconds: float, event_bytes: int
) -> Found:
    """Load one port for so long; `pid`: the process whose CPU time is counted."""
    loop = asyncio.get_running_loop()
    clients = Loop()
    request = request_of(shape)
    before, began = cpu_seconds(pid), time.perf_counter()
    transports = [
        (await loop.create_connection(lambda: Client(request, clients), *address))[0]
        for _ in range(shape.connections)
    ]
    await asyncio.sleep(seconds)
    clients.over = True
    took, used = time.perf_counter() - began, cpu_seconds(pid) - before
    for transport in transports:
        transport.abort()
    count = max(1, len(clients.seconds))
    events = max(1, clients.body_bytes // event_bytes) if shape.stream else 1
    times = clients.seconds or [seconds]
    return Found(
        requests_per_second=count / took,
        events_per_second=events / took if shape.stream else 0.0,
        p50_ms=percentile(times, 50) * 1e3,
        p99_ms=percentile(times, 99) * 1e3,
        cpu_us_per_request=used / count * 1e6,
        cpu_us_per_event=used / events * 1e6,
        failed=clients.failed,
    )


def request_of(shape: Shape) -> bytes:
    """A completion of a 64-byte prompt, as a client writes it."""
    fields: dict[str, object] = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 16}
    if shape.stream:
        fields |= {"stream": True, "user": shape.stream}
    body = msgspec.json.encode(fields)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n"
    )
    return head % len(body) + body


def cpu_seconds(pid: int | None) -> float:
    """User and system time of all threads of a process; 0.0 without one."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
