"""The router's byte path: requests a second, CPU for each event of a stream, time it adds.

Canned engines answer at once, so what is measured is the router. Every figure stands beside the
same load sent straight to an engine (the limit) and through a small aiohttp relay of the same two
legs (the peer), all in one run. Run: `python bench/router.py [--seconds 3] [--connections 32]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import httptools
import msgspec
import uvloop

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("protocol", "sidecar", "tests")
for root in ROOTS:
    sys.path.insert(0, str(REPOSITORY / root))

from pdcluster_protocol.config import RouterConfig  # noqa: E402  The paths come first.
from pdcluster_protocol.ids import Role  # noqa: E402  The paths come first.
from support.canned import RING, CannedWorker, fresh_host  # noqa: E402  The paths come first.

EVENTS = 200
TEXT = b'{"id":"x","object":"text_completion","model":"tiny","choices":[{"index":0,"text":" word",'
EVENT = b"data: %b" % TEXT + b'"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ANSWER = TEXT + b'"finish_reason":"stop"}]}'
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Options(msgspec.Struct, frozen=True):
    """How much load, and who is told."""

    seconds: float = 3.0
    connections: int = 32
    say: Callable[[str], None] = print


class Says(Protocol):
    """What this benchmark needs of the report of all benchmarks."""

    def title(self, text: str) -> None: ...

    def line(self, text: str) -> None: ...


def run(report: Says) -> None:
    """As one of several benchmarks."""
    report.title("router: requests and events over canned engines")
    uvloop.run(compare(Options(say=report.line)))


class Engine(asyncio.Protocol):
    """Answers every leg at once, plain or as a stream whose events are written one by one."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        stream = b'"stream":true' in self.body
        self.body = b""
        if not stream:
            self.transport.write(PLAIN)
            return
        self.transport.write(STREAM_HEAD)
        self.send_event(EVENTS)

    def send_event(self, left: int) -> None:
        if left == 0:
            self.transport.write(DONE)
            return
        self.transport.write(CHUNK)
        asyncio.get_running_loop().call_soon(self.send_event, left - 1)


class Client(asyncio.Protocol):
    """Sends the same request again as soon as it is answered."""

    def __init__(self, request: bytes, load: Load) -> None:
        self.request = request
        self.load = load
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.send()

    def send(self) -> None:
        self.sent_at = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() != 200:
            self.load.failed += 1
        self.load.seconds.append(time.perf_counter() - self.sent_at)
        if not self.load.over:
            # The parser is inside a feed: the next request must not re-enter it.
            asyncio.get_running_loop().call_soon(self.send)


class Load:
    """What one run of the closed loop has seen."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.failed = 0
        self.over = False


async def drive(host: str, port: int, *, stream: bool, seconds: float, connections: int) -> Load:
    """Load one port for so long."""
    body = b'{"prompt":"%b","max_tokens":16%b}' % (b"x" * 64, b',"stream":true' if stream else b"")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    load = Load()
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(head + body, load), host, port))[0]
        for _ in range(connections)
    ]
    await asyncio.sleep(seconds)
    load.over = True
    for client in clients:
        client.abort()
    assert load.failed == 0, f"{load.failed} requests failed"
    return load


async def run_workers(hosts: list[str], control: Path) -> None:
    """Both instances in one process: sidecars on aiohttp, engines on bare protocols."""
    members = []
    loop = asyncio.get_running_loop()
    for role, host in zip(Role, hosts, strict=True):
        worker = CannedWorker(role)
        worker.host, worker.dp = host, 0
        await worker.start()
        server = await loop.create_server(Engine, host, 0, backlog=1024)
        worker.dp = 1
        worker.engine_ports.append(server.sockets[0].getsockname()[1])
        members.append(worker.member)
    tell_members(control, members)
    await asyncio.Event().wait()


def tell_members(control: Path, members: list[Any]) -> None:
    control.write_bytes(msgspec.json.encode(members))


def told_members(control: Path) -> list[Any]:
    """The members once the workers have told them, else nothing."""
    raw = control.read_bytes() if control.exists() else b""
    members: list[Any] = msgspec.json.decode(raw) if raw else []
    return members


async def run_peer(prefill: str, decode: str, port: int) -> None:
    """The peer: two legs through aiohttp, decode's answer passed on."""
    import aiohttp
    from aiohttp import web

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        leg = json.loads(body) | {"stream": False}
        first = asyncio.create_task(read(f"{prefill}/v1/completions", json.dumps(leg).encode()))
        async with session.post(f"{decode}/v1/completions", data=body) as answer:
            response = web.StreamResponse(headers={"content-type": answer.content_type})
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
        await first
        return response

    async def read(url: str, body: bytes) -> bytes:
        async with session.post(url, data=body) as answer:
            return await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        application = web.Application()
        application.add_routes([web.post("/v1/completions", relay)])
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


async def start(*arguments: str, module: str | None = None) -> asyncio.subprocess.Process:
    entry = ["-m", module] if module else [__file__]
    paths = os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *entry,
        *arguments,
        env={**os.environ, "PYTHONPATH": paths},
        stderr=asyncio.subprocess.DEVNULL,
    )


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    for _ in range(400):
        if await condition():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("a process of the benchmark did not start")


async def answers(host: str, port: int, path: str) -> bool:
    """Whether a GET gets 200 (or, for a relay without that path, any answer)."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
    first = await reader.readline()
    writer.close()
    return b" 503 " not in first


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def measure(
    name: str, address: tuple[str, int], pid: int | None, options: Options
) -> dict[str, float]:
    """Plain and streamed load on one port; `pid`: whose CPU is counted."""
    found: dict[str, float] = {}
    one = await drive(*address, stream=False, seconds=1.0, connections=1)
    found["alone_ms"] = sorted(one.seconds)[len(one.seconds) // 2] * 1e3
    for stream in (False, True):
        before = cpu_seconds(pid) if pid else 0.0
        load = await drive(
            *address,
            stream=stream,
            seconds=options.seconds,
            connections=options.connections,
        )
        used = cpu_seconds(pid) - before if pid else 0.0
        count = max(1, len(load.seconds))
        if stream:
            found["events_per_second"] = count * EVENTS / options.seconds
            found["cpu_us_per_event"] = used / (count * EVENTS) * 1e6
        else:
            found["requests_per_second"] = count / options.seconds
            found["cpu_us_per_request"] = used / count * 1e6
    options.say(
        f"{name:8} {found['requests_per_second']:9.0f} requests/s"
        f" {found['cpu_us_per_request']:7.0f} us CPU each"
        f" {found['alone_ms']:7.2f} ms alone"
        f" {found['events_per_second']:9.0f} events/s"
        f" {found['cpu_us_per_event']:6.1f} us CPU each"
    )
    return found


async def compare(options: Options) -> None:
    """Start everything, measure the three ways in turn, end everything."""
    say = options.say
    hosts = [fresh_host(), fresh_host()]
    processes = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        control = folder / "members.json"
        try:
            processes.append(await start("--workers", *hosts, "--control", str(control)))

            async def known() -> bool:
                return bool(told_members(control))

            await until(known)
            members = told_members(control)
            urls = [f"http://{each['host']}:{each['engine_port']}" for each in members]
            port = 28000 + os.getpid() % 1000 * 3
            processes.append(await start("--peer", *urls, "--port", str(port + 2)))
            processes.append(await start_router(folder, members, port))
            await until(lambda: answers("127.0.0.1", port, "/ready"))
            await until(lambda: answers("127.0.0.1", port + 2, "/"))
            _, peer, router = processes
            decode = members[1]
            say(f"{options.connections} connections, {EVENTS} events a stream, 64-byte prompts")
            await measure("engine", (decode["host"], decode["engine_port"]), None, options)
            theirs = await measure("aiohttp", ("127.0.0.1", port + 2), peer.pid, options)
            ours = await measure("router", ("127.0.0.1", port), router.pid, options)
            for key, text in (
                ("requests_per_second", "requests a second"),
                ("cpu_us_per_request", "CPU a request"),
                ("events_per_second", "events a second"),
                ("cpu_us_per_event", "CPU an event"),
            ):
                say(f"router / aiohttp relay, {text}: {ours[key] / theirs[key]:.2f} x")
            say(f"router resident after the run: {resident_bytes(router.pid) / 1e6:.0f} MB")
        finally:
            for process in processes:
                process.kill()
                await process.wait()


async def start_router(folder: Path, members: list[Any], port: int) -> asyncio.subprocess.Process:
    keys = folder / "keys"
    keys.mkdir()
    (keys / RING.current).write_bytes(RING.key(RING.current))
    fields = {
        "cluster": "c",
        "port": port,
        "admin_port": port + 1,
        "keys_folder": str(keys),
        "served_name": "tiny",
        "max_context": 4096,
        "members": members,
    }
    file = folder / "router.json"
    file.write_bytes(msgspec.json.encode(msgspec.convert(fields, RouterConfig)))
    return await start("--config", str(file), module="pdcluster_sidecar.router")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--workers", nargs=2, metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--peer", nargs=2, metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--control", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.workers:
        uvloop.run(run_workers(chosen.workers, chosen.control))
    elif chosen.peer:
        asyncio.run(run_peer(chosen.peer[0], chosen.peer[1], chosen.port))
    else:
        uvloop.run(compare(Options(chosen.seconds, chosen.connections)))
