"""Two replicas a role with two DP ranks each: real processes, real bytes, every rank in use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcluster_protocol.ids import Role
from support.cluster import PairCluster
from support.drains import drain_while_busy
from support.model_runs import PagedModel
from support.ranked import (
    MODEL,
    PROMPTS,
    TOKENS,
    ask_all,
    engines,
    generated,
    kill_while_busy,
    moved_bytes,
    oracle,
    post_json,
    restarts,
    wait_whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SPEC = Path(__file__).parent / "specs/ranks.yaml"
PARALLEL = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[PairCluster]:
    with PairCluster(spec=SPEC) as started:
        yield started


async def test_sixty_four_requests_have_the_librarys_tokens_and_use_every_rank(
    cluster: PairCluster,
) -> None:
    moved, chosen = await moved_bytes(cluster, Role.PREFILL), await generated(cluster, Role.DECODE)
    prompts = PROMPTS * 2
    await ask_all(cluster, prompts, parallel=PARALLEL)

    now = await moved_bytes(cluster, Role.PREFILL)
    assert 4 == len(now)
    assert all(map(int.__lt__, moved, now)), (moved, now)
    per_token = PagedModel(MODEL).layout.bytes_per_token
    assert sum(map(len, prompts)) * per_token == sum(now) - sum(moved)
    after = await generated(cluster, Role.DECODE)
    assert all(map(int.__lt__, chosen, after)), (chosen, after)
    await cluster.wait_idle()


async def test_a_router_that_knows_rank_0_only_is_served_by_both_ranks(
    cluster: PairCluster,
) -> None:
    """A batch with a room a prompt, sent to the first port of either side, as SGLang's router."""
    prefill, decode = (engines(cluster, role)[0] for role in Role)
    before = [await moved_bytes(cluster, Role.PREFILL), await generated(cluster, Role.DECODE)]
    prompts, rooms = PROMPTS[:6], [100, 101, 103, 102, 105, 107]
    host, _, _ = prefill.ready_url.removeprefix("http://").partition(":")
    body: dict[str, Any] = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "bootstrap_host": [host] * len(rooms),
        "bootstrap_port": [8998] * len(rooms),
        "bootstrap_room": rooms,
    }
    urls = [engine.ready_url.replace("/health", "/generate") for engine in (prefill, decode)]
    (status, _), (decoded, answers) = await asyncio.gather(*(post_json(url, body) for url in urls))

    assert (200, 200) == (status, decoded)
    assert [oracle(ids, TOKENS) for ids in prompts] == [answer["output_ids"] for answer in answers]
    after = [await moved_bytes(cluster, Role.PREFILL), await generated(cluster, Role.DECODE)]
    for old, new in zip(before, after, strict=True):
        # Of the first replica both ranks worked, and none of the second.
        assert [True, True, False, False] == [a != b for a, b in zip(old, new, strict=True)]
    await cluster.wait_idle()


@pytest.mark.parametrize("role", Role)
async def test_the_death_of_one_ranks_engine_ends_its_whole_instance_and_no_other(
    cluster: PairCluster, role: Role
) -> None:
    before = restarts(cluster)
    zero, one, *others = (engine.name for engine in engines(cluster, role))
    ended = await kill_while_busy(cluster, [one], role=role)

    assert any(end.error is not None for end in ended) or role is Role.PREFILL
    await wait_whole(cluster, {name: before[name] + 1 for name in (zero, one)})
    after = restarts(cluster)
    assert {name: before[name] for name in others} == {name: after[name] for name in others}
    await ask_all(cluster, PROMPTS[:8], parallel=8)
    await cluster.wait_idle()


@pytest.mark.parametrize(
    ("role", "told"), [(Role.DECODE, (1,)), (Role.PREFILL, (0, 1))], ids=["one rank", "the pod"]
)
async def test_an_instance_that_is_told_to_stop_fails_no_request(
    cluster: PairCluster, role: Role, told: tuple[int, ...]
) -> None:
    before = restarts(cluster)
    ranks = engines(cluster, role)[:2]
    seen = await drain_while_busy(cluster, ranks, [ranks[index].name for index in told])

    assert [] == [end for end in seen.ended if end.error is not None or not end.clear]
    assert 0 == seen.refused_late
    assert seen.probes <= {(503, 200)}
    assert {0} == {seen.exits[ranks[index].name] for index in told}
    await wait_whole(cluster, {rank.name: before[rank.name] + 1 for rank in ranks})
    after = restarts(cluster)
    others = set(before) - {rank.name for rank in ranks}
    assert {name: before[name] for name in others} == {name: after[name] for name in others}
    await ask_all(cluster, PROMPTS[:8], parallel=8)
    await cluster.wait_idle()
