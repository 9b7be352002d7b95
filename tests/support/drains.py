"""SIGTERM to engines of a busy cluster, and what its clients and its router notice of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import aiohttp
import msgspec

from pdctl.processes import ProcessSpec
from support.cluster import Ended, PairCluster, until
from support.ranked import BUSY_TOKENS, PROMPTS, TOKENS, count, oracle

CLIENTS = 8
GENERATED = "pdcluster_tokens_generated_total"
COMPUTED = "pdcluster_prompt_tokens_computed_total"


class Drained(msgspec.Struct, frozen=True):
    """What became of a cluster whose engines were told to stop."""

    ended: list[Ended]
    """Every request that ran meanwhile."""
    refused_late: int
    """Legs that the instance refused after its router knew."""
    probes: set[tuple[int, int]]
    """What `/ready` and `/health` of its engines said meanwhile, as far as they lived."""
    exits: dict[str, int | None]
    """How the processes that were told ended."""


async def drain_while_busy(
    cluster: PairCluster, ranks: Sequence[ProcessSpec], told: Sequence[str]
) -> Drained:
    """SIGTERM while clients ask one question after the other; until the instance is gone."""
    enough = asyncio.Event()
    clients = [asyncio.create_task(_ask_on(cluster, n, enough)) for n in range(CLIENTS)]
    try:
        await _until_busy(ranks)
        pids = {process.name: process.pid for process in cluster.state().processes}
        for name in told:
            os.kill(pids[name], signal.SIGTERM)
        await until(lambda: _is_avoided(cluster, ranks[0].instance), "avoided by the router")
        refused = [await _refused(rank) for rank in ranks]
        probes = {probe for rank in ranks for probe in await _probes(rank)}
        late = await _refused_until_gone(cluster, ranks, pids, refused)
    finally:
        enough.set()
        ended = [end for ends in await asyncio.gather(*clients) for end in ends]
    exits = {p.name: p.last_exit for p in cluster.state().processes if p.name in told}
    return Drained(ended, late, probes, exits)


async def _ask_on(cluster: PairCluster, number: int, enough: asyncio.Event) -> list[Ended]:
    """One client; every token that it sees is right."""
    ended: list[Ended] = []
    while not enough.is_set():
        ids = PROMPTS[(number + CLIENTS * len(ended)) % len(PROMPTS)]
        # Half of them have an answer that outlives what happens around it.
        tokens = BUSY_TOKENS if number % 2 else TOKENS
        asked = cluster.stream if number % 4 < 2 else cluster.generate
        ended.append(end := await asked(ids, tokens))
        assert end.error is not None or len(end.ids) == tokens
        assert oracle(ids, TOKENS)[: len(end.ids)] == end.ids[:TOKENS]
    return ended


async def _until_busy(ranks: Sequence[ProcessSpec]) -> None:
    async def work() -> int:
        return sum([await count(rank, name) for rank in ranks for name in (GENERATED, COMPUTED)])

    before = await work()

    async def busy() -> bool:
        return await work() > before + len(ranks)

    await until(busy, "busy")


async def _is_avoided(cluster: PairCluster, instance: str) -> bool:
    members = (await cluster.ask(cluster.run.admin, "/pd/v1/members"))["members"]
    [usable] = [view["usable"] for view in members if view["instance"] == instance]
    return not usable


async def _refused(rank: ProcessSpec) -> int | None:
    """Legs that a rank has refused because it stops; None once it is gone."""
    try:
        return await count(rank, "pdcluster_requests_total", reason="ShuttingDown")
    except aiohttp.ClientError:
        return None


async def _probes(rank: ProcessSpec) -> list[tuple[int, int]]:
    ready_url = rank.ready_url.replace("/health", "/ready")
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.get(ready_url) as ready,
            client.get(rank.ready_url) as health,
        ):
            return [(ready.status, health.status)]
    except aiohttp.ClientError:
        return []


async def _refused_until_gone(
    cluster: PairCluster,
    ranks: Sequence[ProcessSpec],
    pids: dict[str, int],
    refused: list[int | None],
) -> int:
    """How many legs came too late, as far as the ranks lived to tell."""
    late = 0

    async def gone() -> bool:
        nonlocal late
        now = [await _refused(rank) for rank in ranks]
        living = {p.name: p.pid for p in cluster.state().processes}
        for rank, before, after in zip(ranks, refused, now, strict=True):
            if living[rank.name] == pids[rank.name] and None not in (before, after):
                late = max(late, (after or 0) - (before or 0))
        return all(living[rank.name] != pids[rank.name] for rank in ranks)

    await until(gone, "gone")
    return late
