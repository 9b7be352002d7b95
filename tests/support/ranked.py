"""Questions to clusters of several DP ranks a replica: who computed, who died, who is back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import aiohttp

from pdcluster_protocol.ids import Role
from pdctl.counters import parse, total
from pdctl.processes import ProcessSpec
from support.cluster import DEADLINE_SECONDS, TOPS, Ended, PairCluster, until
from support.oracle import expected
from support.prompts import prompt

MODEL = "tiny-glm"
TOKENS = 12
PROMPTS = [prompt(40 + 11 * index, seed=index) for index in range(32)]
BUSY_TOKENS = 150
"""An answer that is still under way when a process is killed."""


def engines(cluster: PairCluster, role: Role) -> list[ProcessSpec]:
    """The engines of a role, rank by rank and replica by replica."""
    return [process for process in cluster.specs("engine") if process.role == role]


async def count(engine: ProcessSpec, name: str, **labels: str) -> int:
    """A metric of one engine."""
    url = engine.ready_url.replace("/health", "/metrics")
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return total(parse(await answer.text()), name, **labels)


async def moved_bytes(cluster: PairCluster, role: Role) -> list[int]:
    """KV bytes that each engine of a role has moved."""
    name = "pdcluster_kv_bytes_total"
    return [await count(engine, name, kind="kv") for engine in engines(cluster, role)]


async def generated(cluster: PairCluster, role: Role) -> list[int]:
    """Tokens that each engine of a role has chosen."""
    name = "pdcluster_tokens_generated_total"
    return [await count(engine, name) for engine in engines(cluster, role)]


async def post_json(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """One plain request to an engine."""
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
        return answer.status, await answer.json()


def oracle(ids: Sequence[int], tokens: int) -> list[int]:
    """The library's own greedy tokens."""
    return expected(MODEL, ids, tokens, chunk=None, tops=TOPS).ids


async def ask_all(cluster: PairCluster, prompts: list[list[int]], *, parallel: int) -> None:
    """Ask for every prompt, so many at once; every answer is the library's."""
    places = asyncio.Semaphore(parallel)

    async def ask(ids: list[int]) -> Ended:
        async with places:
            return await cluster.generate(ids, TOKENS)

    for ids, ended in zip(prompts, await asyncio.gather(*map(ask, prompts)), strict=True):
        assert (200, None) == (ended.status, ended.error)
        assert oracle(ids, TOKENS) == ended.ids


async def kill_while_busy(cluster: PairCluster, names: list[str], *, role: Role) -> list[Ended]:
    """SIGKILL processes while their instance works; gives how the requests ended.

    Which ranks a router chooses is its own affair, so the instance as a whole is waited for.
    """
    instance = names[0].partition("/")[0]
    ours = [engine for engine in engines(cluster, role) if engine.instance == instance]
    name = "pdcluster_tokens_generated_total"
    before = sum([await count(engine, name) for engine in ours])
    asking = [asyncio.create_task(cluster.stream(ids, BUSY_TOKENS)) for ids in PROMPTS[:12]]

    async def busy() -> bool:
        return sum([await count(engine, name) for engine in ours]) > before + len(ours)

    await until(busy, "busy")
    pids = {process.name: process.pid for process in cluster.state().processes}
    for name in names:
        os.kill(pids[name], signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_SECONDS):
        ended = await asyncio.gather(*asking)
    for ids, end in zip(PROMPTS, ended, strict=False):
        assert end.clear, end
        # What came before an end is right too, and a good end is whole.
        assert oracle(ids, TOKENS) == end.ids[:TOKENS] or len(end.ids) < TOKENS
        assert end.error is not None or len(end.ids) == BUSY_TOKENS
    return ended


async def wait_whole(cluster: PairCluster, restarted: dict[str, int]) -> None:
    """Until these processes have been restarted as often as said, and everything serves."""

    async def whole() -> bool:
        counts = {process.name: process.restarts for process in cluster.state().processes}
        back = all(counts[name] >= times for name, times in restarted.items())
        return back and await cluster.ready()

    await until(whole, "whole again")


def restarts(cluster: PairCluster) -> dict[str, int]:
    """How often each engine was restarted."""
    counts = {process.name: process.restarts for process in cluster.state().processes}
    return {engine.name: counts[engine.name] for engine in cluster.specs("engine")}
