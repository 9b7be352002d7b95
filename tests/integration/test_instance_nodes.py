"""One replica a role whose two DP ranks are in two pods: real processes, one sidecar a pod."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_protocol.ids import Role
from support.cluster import PairCluster
from support.ranked import (
    PROMPTS,
    ask_all,
    engines,
    generated,
    kill_while_busy,
    moved_bytes,
    restarts,
    wait_whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SPEC = Path(__file__).parent / "specs/pods.yaml"


@pytest.fixture(scope="module")
def cluster() -> Iterator[PairCluster]:
    with PairCluster(spec=SPEC) as started:
        yield started


async def test_requests_over_both_pods_have_the_librarys_tokens(cluster: PairCluster) -> None:
    moved, chosen = await moved_bytes(cluster, Role.PREFILL), await generated(cluster, Role.DECODE)
    await ask_all(cluster, PROMPTS, parallel=16)

    assert all(map(int.__lt__, moved, await moved_bytes(cluster, Role.PREFILL)))
    assert all(map(int.__lt__, chosen, await generated(cluster, Role.DECODE)))
    hosts = {engine.ready_url.partition(":3")[0] for engine in cluster.specs("engine")}
    assert 4 == len(hosts)
    await cluster.wait_idle()


@pytest.mark.parametrize(
    ("role", "killed"),
    [
        (Role.DECODE, ["engine-1"]),
        (Role.PREFILL, ["engine-0"]),
        (Role.PREFILL, ["sidecar", "engine-0"]),
        (Role.DECODE, ["sidecar-1", "engine-1"]),
    ],
    ids=str,
)
async def test_the_death_of_an_engine_or_a_pod_ends_the_instance_which_comes_back_whole(
    cluster: PairCluster, role: Role, killed: list[str]
) -> None:
    before = restarts(cluster)
    names = [engine.name for engine in engines(cluster, role)]
    instance = engines(cluster, role)[0].instance
    await kill_while_busy(cluster, [f"{instance}/{name}" for name in killed], role=role)

    await wait_whole(cluster, {name: before[name] + 1 for name in names})
    others = {name: times for name, times in before.items() if name not in names}
    assert others == {name: restarts(cluster)[name] for name in others}
    await ask_all(cluster, PROMPTS[:8], parallel=8)
    await cluster.wait_idle()


@pytest.mark.parametrize("name", ["sidecar", "sidecar-1"])
async def test_a_killed_sidecar_ends_no_running_request(cluster: PairCluster, name: str) -> None:
    before = restarts(cluster)
    instance = engines(cluster, Role.DECODE)[0].instance
    ended = await kill_while_busy(cluster, [f"{instance}/{name}"], role=Role.DECODE)

    assert [None] * len(ended) == [end.error for end in ended]
    await wait_whole(cluster, {f"{instance}/{name}": 1})
    assert before == restarts(cluster)
    await ask_all(cluster, PROMPTS[:8], parallel=8)
    await cluster.wait_idle()
