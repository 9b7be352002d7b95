"""The router's byte path beside another router: requests a second, events a second, CPU of each.

Canned engines answer at once, so what is measured is the router. Our one process and the installed
`sglang-router` get the same load from the same clients in turn, and every ratio is the median of
the ratios of neighbouring runs: so a disturbance of the machine meets both. The time that ours adds
is told against the same request sent straight to an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import uvloop

from bench.figures import Report
from bench.router_engines import EVENT, FLAT_OUT, STEP_SECONDS, STEPPED
from bench.router_load import Found, Shape, drive
from pdcluster_protocol.config import Member, RouterConfig
from support.canned import RING
from support.cluster import until
from support.foreign import PEERS, ForeignRouter
from support.ports import fresh_host

PEER = "sglang-router"
ROUNDS = 5
SECONDS = 2.0
WARM_UP_SECONDS = 0.5
FAST_RATIO_MIN = 1.5
ADDED_MS_MAX = 0.5
EVENTS_PER_SECOND_MIN = 30_000
CPU_RATIO_MAX = 1.0

ONE = Shape(name="1 connection", connections=1)
MANY = Shape(name="32 connections", connections=32)
CROWD = Shape(name="128 connections", connections=128)
STEPS = Shape(name="128 streams, stepped", connections=128, stream=STEPPED)
FLOOD = Shape(name="32 streams, flat out", connections=32, stream=FLAT_OUT)
SHAPES = (ONE, MANY, CROWD, STEPS, FLOOD)

ROOT = Path(__file__).resolve().parents[1]


class Way(msgspec.Struct, frozen=True):
    """One place to send requests to, and whose CPU they cost."""

    name: str
    address: tuple[str, int]
    pid: int | None = None


Rounds = dict[tuple[str, str], list[Found]]
"""By the names of a way and a shape: one entry a round."""


def run(report: Report) -> None:
    """As one of all benchmarks."""
    uvloop.run(compare(report))


async def compare(report: Report) -> None:
    """Start everything, measure all ways in turn, print and judge."""
    rounds = report.times(ROUNDS)
    report.title(f"router: canned engines, {rounds} rounds of {SECONDS:g} s for each way in turn")
    with tempfile.TemporaryDirectory() as name:
        async with engines_running(Path(name)) as members, contextlib.AsyncExitStack() as stack:
            ways = [Way("engine", (members[1].host, members[1].engine_port))]
            ways.append(await stack.enter_async_context(ours_running(Path(name), members)))
            if installed():
                ways.append(await stack.enter_async_context(peer_running(Path(name), members)))
            found = await measure(ways, rounds)
    show(report, ways, found)
    judge(report, found)


async def measure(ways: list[Way], rounds: int) -> Rounds:
    """Every shape through every way, in turn; the first turn warms up and does not count."""
    found: Rounds = {}
    for shape in SHAPES:
        for way in ways:
            await _drive(way, shape, WARM_UP_SECONDS)
        for _ in range(rounds):
            for way in ways:
                run = await _drive(way, shape, SECONDS)
                assert not run.failed, f"{way.name}, {shape.name}: {run.failed} requests failed"
                found.setdefault((way.name, shape.name), []).append(run)
    return found


async def _drive(way: Way, shape: Shape, seconds: float) -> Found:
    return await drive(way.address, shape, pid=way.pid, seconds=seconds, event_bytes=len(EVENT))


# --- telling ------------------------------------------------------------------------------------


def show(report: Report, ways: list[Way], found: Rounds) -> None:
    """Medians of every way and shape."""
    columns = ("load", "way", "requests/s", "p50 ms", "p99 ms", "CPU us", "events/s", "CPU us")
    rows = []
    for shape in SHAPES:
        for way in ways:
            runs = found[way.name, shape.name]
            rows.append((shape.name, way.name, *_cells(shape, runs, counted=way.pid is not None)))
    report.table(columns, rows)
    report.line(
        f"p50, p99: of a request or a whole stream. CPU us: of the way's process, for a request"
        f" and for an event. Stepped: one event a stream each {STEP_SECONDS * 1e3:g} ms."
    )


def _cells(shape: Shape, runs: list[Found], *, counted: bool) -> list[str]:
    def middle(field: str) -> float:
        return float(statistics.median(getattr(each, field) for each in runs))

    requests = [f"{middle('requests_per_second'):.0f}"]
    requests += [f"{middle('p50_ms'):.3f}", f"{middle('p99_ms'):.2f}"]
    requests += [f"{middle('cpu_us_per_request'):.0f}" if counted else ""]
    if not shape.stream:
        return [*requests, "", ""]
    per_event = f"{middle('cpu_us_per_event'):.1f}" if counted else ""
    return [*requests, f"{middle('events_per_second'):.0f}", per_event]


def judge(report: Report, found: Rounds) -> None:
    """Compare with what the router is to reach."""
    ours, direct = found["router", ONE.name], found["engine", ONE.name]
    added = statistics.median(a.p50_ms - b.p50_ms for a, b in zip(ours, direct, strict=True))
    report.limit("router: p50 added at 1 connection", added, limit=ADDED_MS_MAX, unit="ms")
    events = statistics.median(each.events_per_second for each in found["router", STEPS.name])
    report.floor(
        "router: stepped events relayed", events, floor=EVENTS_PER_SECOND_MIN, unit="events/s"
    )
    if (PEER, ONE.name) not in found:
        report.unmeasured(
            f"router: everything beside {PEER}", f"{PEERS / PEER} is missing: run `make interop`"
        )
        return
    for shape in (ONE, CROWD):
        ratio = _ratio(found, shape, "requests_per_second")
        report.line(f"  {shape.name}: {ratio:.2f} times the requests/s of {PEER}")
    report.floor(
        f"router: requests/s at 32 connections beside {PEER}",
        _ratio(found, MANY, "requests_per_second"),
        floor=FAST_RATIO_MIN,
        unit="times",
    )
    for shape in (STEPS, FLOOD):
        report.limit(
            f"router: CPU an event beside {PEER}, {shape.name}",
            _ratio(found, shape, "cpu_us_per_event"),
            limit=CPU_RATIO_MAX,
            unit="times",
        )


def _ratio(found: Rounds, shape: Shape, field: str) -> float:
    """Ours to theirs: the median over neighbouring runs."""
    pairs = zip(found["router", shape.name], found[PEER, shape.name], strict=True)
    return float(statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs))


# --- processes ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def engines_running(folder: Path) -> AsyncIterator[list[Member]]:
    """Both canned instances, in one process beside ours."""
    control = folder / "members.json"
    arguments = ("--hosts", fresh_host(), fresh_host(), "--control", str(control))

    async def told() -> bool:
        return control.exists()

    async with process_running("bench.router_engines", *arguments, log=folder / "engines.log"):
        await until(told, "the canned engines")
        yield told_members(control)


@contextlib.asynccontextmanager
async def ours_running(folder: Path, members: list[Member]) -> AsyncIterator[Way]:
    """One router process of ours."""
    keys = folder / "keys"
    keys.mkdir()
    (keys / RING.current).write_bytes(RING.key(RING.current))
    config = RouterConfig(
        cluster="c",
        port=0,
        admin_port=0,
        keys_folder=str(keys),
        served_name="tiny",
        max_context=4096,
        members=tuple(members),
    )
    file = folder / "router.json"
    file.write_bytes(msgspec.json.encode(config))
    module, log = "pdcluster_sidecar.router", folder / "router.log"
    async with process_running(module, "--config", str(file), log=log) as pid:

        async def ready() -> bool:
            port = told_port(log)
            return port is not None and await answers_ready((config.host, port))

        await until(ready, "our router")
        yield Way("router", (config.host, told_port(log) or 0), pid)


@contextlib.asynccontextmanager
async def peer_running(folder: Path, members: list[Member]) -> AsyncIterator[Way]:
    """The other router, as it logs by itself."""
    urls = [f"http://{member.host}:{member.engine_port}" for member in members]
    log = folder / f"{PEER}.log"
    with ForeignRouter(PEER, prefill=urls[0], decode=urls[1], log=log, log_level="info") as router:
        await until(router.ready, PEER)
        host, _, port = router.url.removeprefix("http://").partition(":")
        yield Way(PEER, (host, int(port)), router.pid)


def installed() -> bool:
    """Whether there is a router to be compared with."""
    return (PEERS / PEER).is_dir()


@contextlib.asynccontextmanager
async def process_running(module: str, *arguments: str, log: Path) -> AsyncIterator[int]:
    """A Python process with this repository on its path; yields its pid."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments,
            env={**os.environ, "PYTHONPATH": paths}, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def told_members(control: Path) -> list[Member]:
    return msgspec.json.decode(control.read_bytes(), type=list[Member])


def told_port(log: Path) -> int | None:
    """The port that our router's log names, once it listens."""
    for line in log.read_bytes().splitlines():
        if b'"listening"' in line:
            return int(msgspec.json.decode(line)["port"])
    return None


async def answers_ready(address: tuple[str, int]) -> bool:
    try:
        reader, writer = await asyncio.open_connection(*address)
    except OSError:
        return False
    writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    first = await reader.readline()
    writer.close()
    return b" 200 " in first
