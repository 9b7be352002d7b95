"""A whole cluster whose prefill engine lies about its writes, by a plan that tests replace.

    with FaultyCluster() as cluster:
        cluster.plan("seed=7,FlippedByte=0.05")

Decode's pool is so small that pages come back to another request at once: what lands late lands
among a neighbour's rows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from pdcluster_protocol.fault_plan import Fault, parse_fault_plan
from pdcluster_protocol.ids import Role
from support.cluster import TIMEOUT, PairCluster

HONEST = "seed=1"
MAX_CONTEXT = 1024
PAGES = {Role.PREFILL: 160, Role.DECODE: 64}
TIMEOUTS = {"abortSeconds": 2, "stallSeconds": 20}


class FaultyCluster(PairCluster):
    """One prefill that lies, one decode, one router."""

    def __init__(self, *, checksum: str = "Full") -> None:
        super().__init__(model="tiny-llama", mode="exact", chunk=100)
        self.checksum = checksum
        self._plans = tempfile.TemporaryDirectory(prefix="plan")
        self.plan(HONEST)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._plans.cleanup()

    def plan(self, text: str) -> None:
        """Lie by this plan from the next write on."""
        parse_fault_plan(text, field="plan")
        fresh = self._file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self._file)

    async def server_information(self, role: Role) -> dict[str, Any]:
        """What a role's engine says of itself to anybody."""
        url = self.address(role, "engine")
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.get(f"{url}/server_info") as answer,
        ):
            shown: dict[str, Any] = await answer.json()
            return shown

    @property
    def _file(self) -> Path:
        return Path(self._plans.name) / "plan"

    def _spec(self) -> dict[str, Any]:
        document = super()._spec()
        spec = document["spec"]
        spec["model"]["maxContext"] = MAX_CONTEXT
        spec["kv"] = {"checksum": self.checksum}
        spec["timeouts"] |= TIMEOUTS
        for role, pages in PAGES.items():
            kept = [arg for arg in spec[role.value]["args"] if not arg.startswith("--pages")]
            spec[role.value]["args"] = [*kept, f"--pages={pages}"]
        spec["prefill"]["args"].append(f"--faults=@{self._file}")
        return document


def injected(values: dict[str, float], fault: Fault) -> float:
    """How often an engine's transport has injected a fault."""
    return values[f'pdcluster_injected_faults_total{{fault="{fault}"}}']
