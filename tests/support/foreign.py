"""Routers that we did not write, before our engines: unmodified programs in environments of theirs.

`tools/interop-peers` installs them below `$PDCLUSTER_PEERS`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from pdcluster_protocol.ids import Role
from support.cluster import PairCluster, until
from support.ports import free_ports
from support.tap import Tap

PEERS = Path(os.environ.get("PDCLUSTER_PEERS", Path.home() / ".cache/pdcluster-peers"))
NAMES = ("sglang-router", "smg")
LAUNCHERS = {
    "sglang-router": ("bin/python", "-m", "sglang_router.launch_router"),
    "smg": ("bin/smg", "launch", "--load-monitor-interval", "1"),
}
REGISTRY_PORT = "8998"
TERMINATE_SECONDS = 10.0


class OpenCluster(PairCluster):
    """A pair that welcomes routers of others."""

    def _spec(self) -> dict[str, Any]:
        spec = super()._spec()
        spec["spec"]["security"] = {"interop": "Allow"}
        return spec


class ForeignRouter:
    """One router process in PD mode; `with` starts and ends it."""

    def __init__(
        self, name: str, *, prefill: str, decode: str, log: Path, log_level: str = "debug"
    ) -> None:
        self.name = name
        self.log = log
        self._log_level = log_level
        self._workers = ("--prefill", prefill, REGISTRY_PORT, "--decode", decode)
        self.url = ""
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> ForeignRouter:
        program, *arguments = LAUNCHERS[self.name]
        path = PEERS / self.name / program
        assert path.exists(), f"{path} is missing: run tools/interop-peers python3"
        port, metrics_port = free_ports()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *_dying_with_us(), str(path), *arguments, "--pd-disaggregation", *self._workers,
            "--policy", "round_robin", "--host", "127.0.0.1", "--port", port,
            "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port,
            "--worker-startup-check-interval", "1", "--health-check-interval-secs", "2",
            # A test that makes failures must not leave a closed door to the next one.
            "--disable-circuit-breaker", "--log-level", self._log_level,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(TERMINATE_SECONDS)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> bool:
        """Whether it has taken both workers in."""
        assert self._process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self.url}/readiness") as answer,
            ):
                return answer.status == 200
        except aiohttp.ClientError:
            return False


class Before:
    """A foreign router before our pair, with a tap at each engine."""

    def __init__(self, cluster: PairCluster, router: ForeignRouter, taps: dict[Role, Tap]) -> None:
        self.cluster = cluster
        self.router = router
        self.taps = taps
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=110))

    @property
    def alone(self) -> str:
        """One engine, which computes what names no partner by itself: the oracle."""
        return self.cluster.address(Role.DECODE, "engine")

    def forget(self) -> None:
        """Start new records at the taps."""
        for tap in self.taps.values():
            tap.forget()

    def post(self, base: str, path: str, body: dict[str, Any]) -> Any:
        """A request as a context manager of its answer."""
        return self._session.post(base + path, json=body)

    async def get(self, path: str) -> tuple[int, str]:
        """What the router answers to a GET."""
        async with self._session.get(self.router.url + path) as answer:
            return answer.status, await answer.text()

    async def close(self) -> None:
        await self._session.close()


@contextlib.asynccontextmanager
async def before(cluster: PairCluster, name: str, folder: Path) -> AsyncIterator[Before]:
    """Put a router before a running pair."""
    engines = {role: cluster.address(role, "engine") for role in Role}
    taps = {role: Tap(url) for role, url in engines.items()}
    async with contextlib.AsyncExitStack() as stack:
        for role, tap in taps.items():
            host = engines[role].removeprefix("http://").rpartition(":")[0]
            await stack.enter_async_context(tap.listening(host))
        router = stack.enter_context(
            ForeignRouter(
                name,
                prefill=taps[Role.PREFILL].url,
                decode=taps[Role.DECODE].url,
                log=folder / f"{name}.log",
            )
        )
        await until(router.ready, f"{name} ready")
        placed = Before(cluster, router, taps)
        stack.push_async_callback(placed.close)
        yield placed


def _dying_with_us() -> list[str]:
    """A test run that is killed takes its router along, where the system can say so."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "TERM"]
