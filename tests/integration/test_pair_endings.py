"""Requests that end before their time: clients leave, processes are killed.

Whatever happens, a client never sees a wrong token and sees one clear end, every page comes back,
and the cluster serves on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from pdcluster_protocol.ids import Role
from support.cluster import TOPS, Ended, PairCluster, until
from support.model_runs import prompt
from support.oracle import expected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROUNDS = 50
TOKENS_TOO_MANY = 2000
"""An answer that would take many seconds, so only leaving can end it soon."""
REQUESTS = ((8000, 100), (130, 500)) * 4
"""Eight: half of them long in prefill, half of them long in decode."""
MORTALS = (
    "prefill/engine",
    "decode/engine",
    "prefill/sidecar",
    "decode/sidecar",
    "prefill/transfer",
    "decode/transfer",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PairCluster]:
    # Mode exact: every token can be compared. Small chunks: prefill takes its time.
    with PairCluster(model="tiny-llama", mode="exact", chunk=32) as started:
        yield started


async def test_fifty_clients_that_leave_their_streams_leave_nothing_behind(
    cluster: PairCluster,
) -> None:
    before = await cluster.metrics(Role.DECODE)
    for number in range(ROUNDS):
        if number % 3 == 2:
            await leave_during_prefill(cluster, prompt(6000, seed=number))
        else:
            ids = prompt(1 + 37 * number, seed=number)
            seen = await cluster.stream(ids, TOKENS_TOO_MANY, leave_after=1 + number % 7)
            assert 1 <= len(seen.ids) < TOKENS_TOO_MANY
            assert 0 == seen.ends
        await cluster.wait_idle()

    router, decode = await cluster.metrics(), await cluster.metrics(Role.DECODE)
    left = 'pdcluster_requests_total{outcome="gone",reason="ClientGone",role="router"}'
    assert ROUNDS == router[left]
    generated = "pdcluster_tokens_generated_total"
    assert ROUNDS * TOKENS_TOO_MANY / 20 > decode[generated] - before[generated]
    for role in Role:
        values = await cluster.metrics(role)
        assert before['pdcluster_pages{state="free"}'] == values['pdcluster_pages{state="free"}']
        assert 0 == cluster.process(f"{role}/engine").restarts


async def leave_during_prefill(cluster: PairCluster, ids: list[int]) -> None:
    """Close the connection while prefill computes."""

    computed = "pdcluster_prompt_tokens_computed_total"
    before = (await cluster.metrics(Role.PREFILL))[computed]

    async def computing() -> bool:
        return (await cluster.metrics(Role.PREFILL))[computed] > before

    client = asyncio.create_task(cluster.stream(ids, TOKENS_TOO_MANY))
    await until(computing, "computing the prompt")
    client.cancel()
    await asyncio.wait([client])
    assert client.cancelled()


@pytest.mark.parametrize("victim", MORTALS)
async def test_a_killed_process_gives_every_running_request_one_clear_end(
    cluster: PairCluster, victim: str
) -> None:
    pid = pid_of(cluster, victim)
    prompts = [prompt(length, seed=index) for index, (length, _) in enumerate(REQUESTS)]
    before = await cluster.metrics(Role.DECODE)
    retries = (await cluster.metrics())["pdcluster_retries_total"]
    clients = [
        asyncio.create_task(
            cluster.stream(ids, tokens) if index % 4 < 2 else cluster.generate(ids, tokens)
        )
        for index, (ids, (_, tokens)) in enumerate(zip(prompts, REQUESTS, strict=True))
    ]
    await until(lambda: under_way(cluster, before, clients), "running all at once")

    os.kill(pid, signal.SIGKILL)

    ends = await asyncio.gather(*clients)
    for ids, (_, tokens), end in zip(prompts, REQUESTS, ends, strict=True):
        assert_clear(cluster, end, ids, tokens)
    if victim == "decode/engine":
        # What a client has read cannot be tried again.
        assert any(end.error is not None for end in ends)
    if victim == "prefill/engine":
        tried_again = (await cluster.metrics())["pdcluster_retries_total"] - retries
        assert tried_again > 0 or any(end.error is not None for end in ends)

    await until(lambda: replaced(cluster, victim, pid), "restarted")
    await until(cluster.ready, "ready again")
    again = await asyncio.gather(*(cluster.generate(ids, 20) for ids in prompts[:4]))
    for ids, end in zip(prompts, again, strict=False):
        assert end.done, end.error
        assert_clear(cluster, end, ids, 20)
    await cluster.wait_idle()


def assert_clear(cluster: PairCluster, end: Ended, ids: list[int], tokens: int) -> None:
    """One end, and not one token that the library would not have given."""
    oracle = expected(cluster.model, ids, tokens, chunk=cluster.chunk, tops=TOPS)
    assert end.clear, end
    assert oracle.ids[: len(end.ids)] == end.ids
    assert oracle.tops[: len(end.tops)] == end.tops
    if end.done:
        assert tokens == len(end.ids)


def pid_of(cluster: PairCluster, name: str) -> int:
    role, _, kind = name.partition("/")
    return cluster.transfer_pid(Role(role)) if kind == "transfer" else cluster.process(name).pid


async def under_way(
    cluster: PairCluster, before: dict[str, float], clients: list[asyncio.Task[Ended]]
) -> bool:
    """All requests run: prefill computes for some, decode answers others."""
    router, prefill, decode = await asyncio.gather(
        cluster.metrics(), cluster.metrics(Role.PREFILL), cluster.metrics(Role.DECODE)
    )
    running = router["pdcluster_in_flight"]
    in_prefill = prefill['pdcluster_queue{queue="rooms"}']
    generated = "pdcluster_tokens_generated_total"
    answered = decode[generated] - before[generated]
    ended = [client.result() for client in clients if client.done()]
    assert [] == ended, f"before {running=} {in_prefill=} {answered=} were enough"
    return running == len(REQUESTS) and in_prefill > 0 and answered > 0


async def replaced(cluster: PairCluster, victim: str, pid: int) -> bool:
    """Whether another process does the victim's work."""
    try:
        return pid_of(cluster, victim) not in {0, pid}
    except (ValueError, IndexError):
        return False
