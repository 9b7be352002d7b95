"""Requests that end before their time: clients leave, processes are killed.

Whatever happens, a client never sees a wrong token and sees one clear end, every page comes back,
and the cluster serves on. A few rounds of what `make soak` does for hours.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from pdcluster_protocol.ids import Role
from soak.deaths import kill_again_and_again
from soak.departures import LEAVING, leave_again_and_again
from soak.processes import find, mortals
from soak.questions import Bank
from support.cluster import PairCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CLIENTS = 16
DEPARTURES = 15
SEED = 20261201
MORTALS = (
    "pair-router-0",
    "pair-prefill-0/sidecar",
    "pair-prefill-0/engine-0",
    "pair-prefill-0/engine-0/transfer",
    "pair-decode-0/sidecar",
    "pair-decode-0/engine-0",
    "pair-decode-0/engine-0/transfer",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PairCluster]:
    # Mode exact: every token can be compared. Small chunks: prefill takes its time.
    with PairCluster(model="tiny-llama", mode="exact", chunk=32) as started:
        yield started


@pytest.fixture(scope="module")
def bank(cluster: PairCluster) -> Bank:
    made = Bank(cluster, clients=CLIENTS, sets=1, deadline_seconds=60.0)
    asyncio.run(made.prepare())
    return made


async def test_clients_that_leave_leave_nothing_behind(cluster: PairCluster, bank: Bank) -> None:
    free = 'pdcluster_pages{state="free"}'
    before = {role: await cluster.metrics(role) for role in Role}
    dice = random.Random(SEED)
    tally = await leave_again_and_again(cluster, bank, rounds=DEPARTURES, dice=dice)
    assert ([], DEPARTURES) == (tally.violations, tally.rounds)
    assert DEPARTURES * LEAVING == sum(tally.moments.values())
    assert 4 <= len(tally.moments), tally.moments
    for role in Role:
        assert before[role][free] == (await cluster.metrics(role))[free]
        assert 0 == cluster.process(f"{role}/engine").restarts


@pytest.mark.parametrize("victim", MORTALS)
async def test_a_killed_process_gives_every_running_request_one_clear_end(
    cluster: PairCluster, bank: Bank, victim: str
) -> None:
    process, dice = find(cluster, victim), random.Random(SEED)
    tally = await kill_again_and_again(cluster, bank, process, rounds=1, dice=dice)
    assert ([], 1) == (tally.violations, tally.rounds)
    assert CLIENTS // 4 < sum(tally.running.values())


def test_each_process_of_the_pair_is_killed(cluster: PairCluster) -> None:
    assert list(MORTALS) == [process.name for process in mortals(cluster)]
