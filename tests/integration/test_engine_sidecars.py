"""Engine processes with their real sidecars: pairs, deaths on either side, restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.control_api import LoadReport
from pdcluster_protocol.ids import Role
from support.legs import LegClient, prompt_of
from support.nursery import Nursery
from support.ports import transfer_ports
from support.promptness import PROMPT_SECONDS
from support.sidecars import KEY, SidecarProcess, running, until


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("n")) as warm:
        yield warm


class Cluster:
    """One prefill pod and one decode pod."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.nursery = nursery
        self.sidecars = {role: SidecarProcess(folder / role, role) for role in Role}
        self.pids: dict[Role, int] = {}
        self.urls = {
            role: f"http://{sidecar.config.host}:{sidecar.config.engine_http_port}"
            for role, sidecar in self.sidecars.items()
        }
        self.client = LegClient(KEY, bootstrap=self.sidecars[Role.PREFILL].http)

    def config(self, role: Role) -> EngineConfig:
        sidecar = self.sidecars[role].config
        return EngineConfig(
            cluster=sidecar.cluster,
            instance=sidecar.instance,
            role=role,
            host=sidecar.host,
            http_port=sidecar.engine_http_port,
            link_path=sidecar.link_path,
            keys_folder=sidecar.keys_folder,
            model_source="builtin://tiny-llama",
            served_name="tiny",
            max_context=2048,
            chunk=64,
            fingerprint=sidecar.fingerprint,
            **transfer_ports(),
        )

    async def start_engine(self, role: Role) -> None:
        self.pids[role] = self.nursery.fork(self.config(role))
        await self.wait_ready(role)

    async def wait_ready(self, role: Role) -> None:
        async def ready() -> bool:
            # The sidecar knows first: the engine has yet to read the answer to its hello.
            status, _ = await self.sidecars[role].call("GET", "/ready")
            return status == 200 and await self.client.ready(self.urls[role])

        await until(ready)

    async def incarnation(self, role: Role) -> str:
        _, raw = await self.sidecars[role].call("GET", "/pd/v1/load", signed=True)
        return msgspec.json.decode(raw, type=LoadReport).incarnation

    async def dumps(self) -> dict[str, str]:
        """What each pod says of itself, for the message of a failure."""
        return {
            role: (await sidecar.call("GET", "/pd/v1/dump", signed=True))[1].decode()
            for role, sidecar in self.sidecars.items()
        }

    async def run(self, leg: dict[str, Any]) -> tuple[Any, Any]:
        return await self.client.run_pair(self.urls[Role.PREFILL], self.urls[Role.DECODE], leg)

    async def wait_idle(self, role: Role) -> None:
        """Until every page is free again."""

        async def idle() -> bool:
            values = await self.client.metrics(self.urls[role])
            return (
                values['pdcluster_pages{state="owned"}']
                == 0
                == (values['pdcluster_pages{state="quarantined"}'])
            )

        await until(idle)

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGTERM)
        for pid in self.pids.values():
            self.nursery.exit_of(pid)


@asynccontextmanager
async def cluster(nursery: Nursery, folder: Path) -> AsyncIterator[Cluster]:
    made = Cluster(nursery, folder)
    async with running(*made.sidecars.values()):
        try:
            await asyncio.gather(*(made.start_engine(role) for role in Role))
            yield made
        finally:
            made.end()


async def test_eight_pairs_at_once_give_the_tokens_of_one_engine(
    nursery: Nursery, tmp_path: Path
) -> None:
    async with cluster(nursery, tmp_path) as pods:
        legs = [pods.client.leg(prompt_of(64 + 13 * index)) for index in range(8)]
        answers = await asyncio.gather(*(pods.run(leg) for leg in legs))
        for leg, (_, second) in zip(legs, answers, strict=True):
            body = pods.client.alone(leg)
            alone = await pods.client.generate(pods.urls[Role.PREFILL], body, signed=False)
            assert alone["output_ids"] == second["output_ids"]
        for role in Role:
            await pods.wait_idle(role)


async def test_a_killed_prefill_ends_its_rooms_at_once_and_its_successor_serves(
    nursery: Nursery, tmp_path: Path
) -> None:
    async with cluster(nursery, tmp_path) as pods:
        await pods.run(pods.client.leg(prompt_of(64)))
        # Held while it is stopped, so its rooms are open when it dies.
        os.kill(pods.pids[Role.PREFILL], signal.SIGSTOP)
        legs = [pods.client.leg(prompt_of(200)) for _ in range(4)]
        decodes = [
            asyncio.create_task(pods.client.generate(pods.urls[Role.DECODE], leg)) for leg in legs
        ]

        async def owned() -> bool:
            values = await pods.client.metrics(pods.urls[Role.DECODE])
            return values['pdcluster_pages{state="owned"}'] > 0

        await until(owned)
        begun = time.monotonic()
        os.kill(pods.pids[Role.PREFILL], signal.SIGKILL)
        answers = await asyncio.gather(*decodes)
        assert time.monotonic() - begun < PROMPT_SECONDS
        assert ["PeerDied"] * 4 == [answer["error"]["code"] for answer in answers]
        pods.nursery.exit_of(pods.pids[Role.PREFILL])
        await pods.start_engine(Role.PREFILL)
        first, second = await pods.run(pods.client.leg(prompt_of(64)))
        assert "output_ids" in second, (first, second, await pods.dumps())
        await pods.wait_idle(Role.DECODE)


async def test_a_killed_sidecar_fails_no_running_request_and_is_joined_again(
    nursery: Nursery, tmp_path: Path
) -> None:
    async with cluster(nursery, tmp_path) as pods:
        leg = pods.client.leg(prompt_of(64), max_new_tokens=900, ignore_eos=True)
        task = asyncio.create_task(pods.run(leg))

        async def decoding() -> bool:
            values = await pods.client.metrics(pods.urls[Role.DECODE])
            return values["pdcluster_tokens_generated_total"] > 5

        await until(decoding)
        sidecar = pods.sidecars[Role.DECODE]
        before = await pods.incarnation(Role.DECODE)
        await sidecar.stop(signal.SIGKILL)
        await sidecar.start()
        await pods.wait_ready(Role.DECODE)
        _, second = await task
        assert 900 == len(second["output_ids"])
        assert before == await pods.incarnation(Role.DECODE)
        _, later = await pods.run(pods.client.leg(prompt_of(64)))
        assert 16 == len(later["output_ids"])
