"""One process of a busy cluster is killed, again and again.

A round: all clients of a set run at once; at a moment that the dice choose, from "none has a token
yet" to "many have", the victim gets SIGKILL, and a few more clients come at once. Each of them must
have one end that is right or clear; then the victim must be back, later requests right, and every
process hold nothing of it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import NamedTuple

from soak.leaks import History, files
from soak.processes import Process, processes
from soak.questions import Bank, Question, Seen
from soak.tally import Tally
from support.cluster import PairCluster, until

ARRIVING = 4
LATER = 4
GENERATED = "pdcluster_tokens_generated_total"
COMPUTED = "pdcluster_prompt_tokens_computed_total"


async def kill_again_and_again(
    cluster: PairCluster, bank: Bank, victim: Process, *, rounds: int, dice: random.Random
) -> Tally:
    """All rounds of one victim; stops early when the cluster does not come back."""
    tally = Tally(victim.name, kind=victim.kind)
    lying = files(cluster)
    history = History()
    try:
        for _ in range(rounds):
            await kill_once(cluster, bank, victim, dice=dice, tally=tally)
            history.look(cluster)
        assert lying == files(cluster), f"files came or went: {lying ^ files(cluster)}"
    except AssertionError as error:
        tally.violated(str(error))
    for leak in history.leaks():
        tally.violated(leak)
    return tally


async def kill_once(
    cluster: PairCluster, bank: Bank, victim: Process, *, dice: random.Random, tally: Tally
) -> None:
    """One round.

    Raises:
        AssertionError: the cluster does not serve again, or is not idle again.
    """
    questions = bank.draw(dice)
    moment = await _choose(cluster, questions, dice)
    clients = [asyncio.create_task(bank.ask(question)) for question in questions]
    try:
        await _reach(cluster, moment, clients)
        await _kill(cluster, bank, victim, clients, questions, tally=tally)
        tally.moments[moment.name] += 1
    finally:
        # After a violation nobody may go on asking.
        await _cancel(clients)
    await cluster.wait_idle()
    faults = cluster.faults()
    assert not faults, f"faults of our own: {faults[:3]}"
    tally.rounds += 1


async def _kill(
    cluster: PairCluster,
    bank: Bank,
    victim: Process,
    clients: list[asyncio.Task[Seen]],
    questions: list[Question],
    *,
    tally: Tally,
) -> None:
    """Kill the victim under its clients, and wait for everything that follows."""
    ended = {client for client in clients if client.done()}
    living = {process.name: process.pid for process in processes(cluster)}
    pid = living[victim.name]
    died_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    arriving = [asyncio.create_task(bank.ask(question)) for question in questions[:ARRIVING]]
    back = asyncio.create_task(_back(cluster, set(living), pid))

    for client, seen in zip(clients, await asyncio.gather(*clients), strict=True):
        if client in ended:
            tally.served([seen])
        else:
            tally.ran(seen, died_at)
    for seen in await asyncio.gather(*arriving):
        tally.arrived(seen, died_at)
    tally.longest_outage_seconds = max(tally.longest_outage_seconds, await back - died_at)
    tally.served(await asyncio.gather(*map(bank.ask, questions[-LATER:])))


async def _cancel(tasks: list[asyncio.Task[Seen]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class _Moment(NamedTuple):
    """When the victim dies."""

    name: str
    metric: str
    wanted: int
    """What the metric of all engines must have come to."""


async def _choose(cluster: PairCluster, questions: list[Question], dice: random.Random) -> _Moment:
    """A moment for these questions, before the first of them is asked."""
    name, metric, most = dice.choice(
        (
            ("before any token", GENERATED, 0),
            ("among prompts", COMPUTED, sum(len(question.ids) for question in questions) // 3),
            ("among answers", GENERATED, sum(question.tokens for question in questions) // 10),
        )
    )
    so_far = await cluster.count("engine", metric)
    return _Moment(name, metric, so_far + (dice.randrange(most) if most else 0))


async def _reach(cluster: PairCluster, moment: _Moment, clients: list[asyncio.Task[Seen]]) -> None:
    """Wait until all clients run and the moment has come."""

    async def reached() -> bool:
        running, count = await asyncio.gather(
            cluster.count("router", "pdcluster_in_flight"), cluster.count("engine", moment.metric)
        )
        everybody = running + sum(client.done() for client in clients) >= len(clients)
        return everybody and count >= moment.wanted

    await until(reached, f"{moment.name}: {len(clients)} requests running")


async def _back(cluster: PairCluster, names: set[str], pid: int) -> float:
    """Wait until another process does the victim's work; when that was."""
    await until(lambda: _replaced(cluster, names, pid), f"another process in place of {pid}")
    await until(cluster.ready, "ready again")
    return time.monotonic()


async def _replaced(cluster: PairCluster, names: set[str], pid: int) -> bool:
    """Whether all run again; the transfer processes of one engine may have swapped names."""
    now = {process.name: process.pid for process in processes(cluster)}
    return names == now.keys() and not {0, pid} & set(now.values())
