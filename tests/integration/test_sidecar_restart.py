"""A sidecar that comes back names the incarnation of its living engine in its first answer.

Between its start and the engine's next dial it knows none, which is also what a sidecar says whose
engine has died: a router that heard it would end every request that runs there.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from pdcluster_protocol.control_api import LoadReport
from pdcluster_protocol.ids import Role
from support.sidecars import FakeEngine, SidecarProcess, running, until

pytestmark = pytest.mark.slow

ASKED_IN_VAIN = 20
"""So often somebody asks between the start of the sidecar and the return of its engine."""


@pytest_asyncio.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[SidecarProcess]:
    process = SidecarProcess(tmp_path, Role.DECODE)
    async with running(process):
        yield process


async def incarnation(sidecar: SidecarProcess) -> str | None:
    """What it says its engine is; None while it does not answer."""
    try:
        status, raw = await sidecar.call("GET", "/pd/v1/load", signed=True)
    except aiohttp.ClientError:
        return None
    assert 200 == status
    return msgspec.json.decode(raw, type=LoadReport).incarnation


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_nobody_hears_of_an_engine_without_incarnation(
    sidecar: SidecarProcess, how: signal.Signals
) -> None:
    before = FakeEngine(sidecar.config)
    known = (await before.open()).incarnation
    await sidecar.stop(how)
    await before.die()
    starting = asyncio.create_task(sidecar.start())

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(sidecar.config.link_path)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    await until(listens)
    heard = [await incarnation(sidecar) for _ in range(ASKED_IN_VAIN)]
    again = FakeEngine(sidecar.config, incarnation=known)
    assert known == (await again.open()).incarnation
    await starting
    heard.append(await incarnation(sidecar))
    assert {None, known} == set(heard)
    await again.die()


async def test_without_its_engine_it_serves_after_a_moment(sidecar: SidecarProcess) -> None:
    engine = FakeEngine(sidecar.config)
    await engine.open()
    await sidecar.stop(signal.SIGKILL)
    await engine.die()
    await sidecar.start()
    assert "" == await incarnation(sidecar)
    assert b"no engine came back" in sidecar.log.read_bytes()
