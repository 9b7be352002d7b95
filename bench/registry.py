"""The bootstrap registry of a sidecar process beside SGLang's own class: questions and a storm.

The same bytes go to both in the same run, in turn: 16 kept-alive connections ask for the server and
for ranks and register one rank again and again; then 4,096 ranks of one instance register over 64
connections, a quarter of them twice. Ours is measured open (`security.interop: Allow`), as a plain
SGLang rank finds it, and with signatures.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import uvloop

from bench import peers
from bench.exchange import cpu_seconds
from bench.figures import Report, median
from bench.http_load import Load, drive
from bench.registrations import STORM_RANKS, Sign, body, get, put, storm
from support.sidecars import SidecarProcess, running

ROUNDS = 3
REQUESTS = 4_000
CONNECTIONS, STORM_CONNECTIONS = 16, 64
START_SECONDS = 60.0
STORM_SECONDS_MAX = 5.0
RATIO_MIN = 1.5
SEED = 20261201
OURS, SIGNED, THEIRS = "ours, open", "ours, signed", "SGLang"
KINDS = ("GET all", "GET rank", "PUT again")


class Registry(msgspec.Struct, frozen=True):
    """One process that serves `/route`."""

    name: str
    address: tuple[str, int]
    pid: int
    sign: Sign | None = None


class Round(msgspec.Struct, frozen=True):
    """One load on one registry."""

    rate: float
    cpu_us: float
    """Of the registry's process, for each request."""


class Storm(msgspec.Struct, frozen=True):
    """What became of 4,096 registrations."""

    seconds: float
    cpu_seconds: float
    ready_before_last: bool
    ready_after_last: bool


def run(report: Report) -> None:
    """Measure and print."""
    report.title("registry: /route of a sidecar beside SGLang's registry class")
    uvloop.run(_compare(report))


async def _compare(report: Report) -> None:
    rounds: dict[tuple[str, str], list[Round]] = {}
    storms: dict[str, list[Storm]] = {}
    requests = REQUESTS if report.times(ROUNDS) == ROUNDS else REQUESTS // 20
    async with _registries() as registries:
        for registry in registries:
            await _ask(registry, [put(body(0, dp=1, tp=1), registry.sign)])
        for _ in range(report.times(ROUNDS)):
            for kind in KINDS:
                for registry in registries:
                    measured = await _measure(registry, kind, requests)
                    rounds.setdefault((registry.name, kind), []).append(measured)
    for number in range(report.times(ROUNDS)):
        # A storm needs a registry that knows nobody yet.
        async with _registries() as registries:
            for registry in registries:
                storms.setdefault(registry.name, []).append(await _storm(registry, SEED + number))
    _tell(report, rounds, storms)
    _judge(report, rounds, storms)


# --- loads ----------------------------------------------------------------------------------------


async def _measure(registry: Registry, kind: str, count: int) -> Round:
    match kind:
        case "GET all":
            requests = [get(-1, -1, registry.sign) for _ in range(count)]
        case "GET rank":
            requests = [get(0, 0, registry.sign) for _ in range(count)]
        case _:
            requests = [put(body(0, dp=1, tp=1), registry.sign) for _ in range(count)]
    before = cpu_seconds(registry.pid)
    load = await _ask(registry, requests)
    return Round(load.rate, (cpu_seconds(registry.pid) - before) / count * 1e6)


async def _storm(registry: Registry, seed: int) -> Storm:
    bodies, last = storm(seed)
    requests = [put(each, registry.sign) for each in bodies]
    before = cpu_seconds(registry.pid)
    load = await _ask(registry, requests, connections=STORM_CONNECTIONS)
    used = cpu_seconds(registry.pid) - before
    ready_before = await drive(registry.address, [get(-1, -1, registry.sign)], connections=1)
    await _ask(registry, [put(last, registry.sign)])
    ready_after = await drive(registry.address, [get(-1, -1, registry.sign)], connections=1)
    return Storm(load.seconds, used, 200 in ready_before.statuses, 200 in ready_after.statuses)


async def _ask(
    registry: Registry, requests: list[bytes], *, connections: int = CONNECTIONS
) -> Load:
    """Send them all.

    Raises:
        RuntimeError: one was not answered with 200.
    """
    load = await drive(registry.address, requests, connections=min(connections, len(requests)))
    if set(load.statuses) != {200}:
        raise RuntimeError(f"{registry.name} answers {load.statuses}")
    return load


# --- what is printed ------------------------------------------------------------------------------


def _tell(
    report: Report, rounds: dict[tuple[str, str], list[Round]], storms: dict[str, list[Storm]]
) -> None:
    rows = [
        (kind, name, f"{median([r.rate for r in found]):.0f}", f"{_cpu(found):.1f}")
        for (name, kind), found in sorted(rounds.items(), key=lambda each: each[0][1])
    ]
    report.table(("request", "", "1/s", "CPU us each"), rows)
    rows = [
        (
            name,
            f"{median([one.seconds for one in found]):.2f}",
            f"{median([one.cpu_seconds for one in found]):.2f}",
            "wrongly" if any(one.ready_before_last for one in found) else "no",
            "yes" if all(one.ready_after_last for one in found) else "NO",
        )
        for name, found in storms.items()
    ]
    columns = (f"storm of {STORM_RANKS} ranks", "s", "CPU s", "ready before the last", "after it")
    report.table(columns, rows)


def _judge(
    report: Report, rounds: dict[tuple[str, str], list[Round]], storms: dict[str, list[Storm]]
) -> None:
    for name in (OURS, SIGNED):
        found = storms[name]
        longest = max(one.seconds for one in found)
        report.limit(f"registry, storm, {name}", longest, limit=STORM_SECONDS_MAX, unit="s")
        wrong = sum(one.ready_before_last or not one.ready_after_last for one in found)
        report.limit(f"registry, not ready exactly at the last, {name}", wrong, limit=0, unit="")
    if THEIRS not in storms:
        report.unmeasured("registry, ours / SGLang's class", peers.HOW)
        return
    for name in (OURS, SIGNED):
        for kind in KINDS:
            pairs = zip(rounds[THEIRS, kind], rounds[name, kind], strict=True)
            _floor(report, f"{kind}, {name}", [one.cpu_us / other.cpu_us for one, other in pairs])
        both = zip(storms[THEIRS], storms[name], strict=True)
        ratios = [one.cpu_seconds / other.cpu_seconds for one, other in both]
        _floor(report, f"storm, {name}", ratios)


def _floor(report: Report, what: str, ratios: list[float]) -> None:
    what = f"registry, {what}: requests for a second of CPU, over SGLang's"
    report.floor(what, median(ratios), floor=RATIO_MIN, unit="times")


def _cpu(found: list[Round]) -> float:
    return median([each.cpu_us for each in found])


# --- the registries -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _registries() -> AsyncIterator[list[Registry]]:
    with tempfile.TemporaryDirectory(prefix="pdb") as name:
        folder = Path(name)
        opened = SidecarProcess(folder / "open", "prefill", interop="Allow")
        signed = SidecarProcess(folder / "signed", "prefill")
        async with running(opened, signed):
            with _theirs() as theirs:
                found = [
                    Registry(OURS, (opened.config.host, opened.config.http_port), opened.pid),
                    Registry(
                        SIGNED,
                        (signed.config.host, signed.config.http_port),
                        signed.pid,
                        functools.partial(signed.signer.sign, authority=str(signed.http)),
                    ),
                ]
                if theirs is not None:
                    await _listening(theirs.address)
                    found.append(theirs)
                yield found


@contextlib.contextmanager
def _theirs() -> Iterator[Registry | None]:
    if not peers.installed():
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    process = peers.start("sglang_registry.py", *map(str, address), stderr=subprocess.DEVNULL)
    try:
        yield Registry(THEIRS, address, process.pid)
    finally:
        peers.end(process)


async def _listening(address: tuple[str, int]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*address)
                writer.close()
                return
            await asyncio.sleep(0.1)
