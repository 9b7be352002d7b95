"""Canned engines for the router's benchmark, in a process of their own: `-m bench.router_engines`.

They answer every leg at once, plain or as a stream, and cost some 6 us of CPU a leg. Around each
stands the sidecar that our router asks; routers of others find the paths that they probe.

A stream is either *flat out*, all its events as fast as they are taken, or *stepped*: every running
stream gets one event each few milliseconds, as a batch of sequences does that is decoded together.
Then a router reads every event by itself, and what one costs can be told.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httptools
import msgspec
import uvloop

from pdcluster_protocol.config import Member
from pdcluster_protocol.ids import Role
from support.canned import CannedWorker

STEP_SECONDS = 0.004
FLAT_OUT_EVENTS = 200
STEPPED_EVENTS = 250
FLAT_OUT, STEPPED = "flat-out", "stepped"
TEXT = b'{"id":"x","object":"text_completion","model":"tiny","choices":[{"index":0,"text":" word",'
EVENT = b"data: %b" % TEXT + b'"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ANSWER = TEXT + b'"finish_reason":"stop"}]}'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
PROBED = msgspec.json.encode(
    {"served_model_name": "tiny", "model_path": "tiny", "status": "ready", "data": [], "models": []}
)


def plain(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


PLAIN = plain(ANSWER)
PROBE = plain(PROBED)


class Steps:
    """One event for every stepped stream, each few milliseconds."""

    def __init__(self) -> None:
        self._streams: dict[Engine, int] = {}
        self._loop = asyncio.get_running_loop()
        self._next_at = 0.0

    def add(self, engine: Engine) -> None:
        if not self._streams:
            self._next_at = self._loop.time() + STEP_SECONDS
            self._loop.call_at(self._next_at, self._step)
        self._streams[engine] = STEPPED_EVENTS

    def discard(self, engine: Engine) -> None:
        self._streams.pop(engine, None)

    def _step(self) -> None:
        for engine, left in tuple(self._streams.items()):
            if left:
                self._streams[engine] = left - 1
                engine.write(CHUNK)
            else:
                del self._streams[engine]
                engine.write(DONE)
        if self._streams:
            # Behind schedule the next step comes at once, but steps that were missed do not.
            self._next_at = max(self._next_at + STEP_SECONDS, self._loop.time())
            self._loop.call_at(self._next_at, self._step)


class Engine(asyncio.Protocol):
    """One connection: every leg is answered at once."""

    def __init__(self, role: Role, steps: Steps) -> None:
        self._role = role
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if self._parser.get_method() != b"POST":
            self.write(PROBE)
        elif b'"stream":true' not in body:
            self.write(PLAIN)
        elif self._role is Role.PREFILL:
            # Some routers let prefill stream as well: it has one token to tell.
            self.write(STREAM_HEAD + CHUNK + DONE)
        elif STEPPED.encode() in body:
            self.write(STREAM_HEAD)
            self._steps.add(self)
        else:
            self.write(STREAM_HEAD)
            self._flat_out(FLAT_OUT_EVENTS)

    def write(self, raw: bytes) -> None:
        self._transport.write(raw)

    def _flat_out(self, left: int) -> None:
        if left == 0:
            self.write(DONE)
            return
        self.write(CHUNK)
        asyncio.get_running_loop().call_soon(self._flat_out, left - 1)


async def serve(hosts: list[str], control: Path) -> None:
    """One instance of each role; then their members are written to `control`."""
    members = []
    steps = Steps()
    for role, host in zip(Role, hosts, strict=True):
        worker = CannedWorker(role)
        worker.host, worker.dp = host, 0
        await worker.start()
        server = await asyncio.get_running_loop().create_server(
            partial(Engine, role, steps), host, 0, backlog=1024
        )
        worker.dp = 1
        worker.engine_ports.append(server.sockets[0].getsockname()[1])
        members.append(worker.member)
    tell(control, members)
    await asyncio.Event().wait()


def tell(control: Path, members: list[Member]) -> None:
    """Write the members at once as a whole."""
    draft = control.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(members))
    draft.rename(control)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", nargs=2, required=True)
    parser.add_argument("--control", type=Path, required=True)
    chosen = parser.parse_args()
    uvloop.run(serve(chosen.hosts, chosen.control))
