"""Replicas of several ranks: the tokens are those of one process, whatever mapping lies between.

Every rank has an arena, a link and a transfer process of its own, so real bytes cross Mooncake for
each pair of ranks: heads, layers, ranges of pages, and latent rows that one rank of a span sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import yaml

from pdcluster_engine.memory.metadata import METADATA_SLOT_BYTES
from pdcluster_protocol.ids import Role
from pdcluster_protocol.rank_layout import rank_slice
from pdcluster_protocol.ranks import rank_coordinates
from pdcluster_protocol.topology import Parallelism
from support.cluster import SPEC, Ended, PairCluster
from support.model_runs import PagedModel
from support.oracle import expected
from support.prompts import prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

REQUESTS = 32
PARALLEL = 8
TOKENS = 8
LENGTHS = (1, 63, 64, 65, 127, 129, 200, 333)
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "max_new_tokens": TOKENS}


class Shape(msgspec.Struct, frozen=True):
    """A model and the ranks of both roles."""

    model: str
    prefill: dict[str, int]
    decode: dict[str, int]


SHAPES = {
    "heads, tp 4 to 2": Shape("tiny-qwen", {"tp": 4}, {"tp": 2}),
    "heads, tp 2 to 4": Shape("tiny-qwen", {"tp": 2}, {"tp": 4}),
    "layers, pp 2 to 1": Shape("tiny-deepseek", {"pp": 2}, {}),
    "page ranges, cp 2 to 1": Shape("tiny-glm", {"tp": 2, "cp": 2}, {}),
    "latent, tp 4 to 2 with dummies": Shape("tiny-glm", {"tp": 4}, {"tp": 2}),
    "dp 2 of tp 2 and pp 2 to dp 2": Shape(
        "tiny-qwen", {"tp": 4, "dp": 2, "pp": 2}, {"tp": 2, "dp": 2}
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def cluster(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairCluster]:
    spec: dict[str, Any] = yaml.safe_load(SPEC.read_text())
    spec["spec"]["prefill"]["parallel"] = shape.prefill
    spec["spec"]["decode"]["parallel"] = shape.decode
    spec["spec"]["model"]["maxContext"] = 1024
    path = tmp_path_factory.mktemp("ranks") / "ranks.yaml"
    path.write_text(yaml.safe_dump(spec))
    with PairCluster(model=shape.model, chunk=100, spec=path) as started:
        yield started


class Asked(msgspec.Struct, frozen=True):
    """What came of all requests."""

    greedy: dict[int, Ended]
    """By prompt length; the first half of the requests is greedy."""
    sampled: dict[int, tuple[Ended, Ended]]
    """By seed: through the pair, and by one decode engine alone."""
    moved: dict[str, int]
    """Bytes that these requests moved, by kind."""


@pytest.fixture(scope="module")
def asked(cluster: PairCluster) -> Asked:
    return asyncio.run(ask_all(cluster))


def lengths() -> list[int]:
    """One prompt length a request, all different so that every prompt is."""
    rounds = REQUESTS // len(LENGTHS)
    return [length + extra for length in LENGTHS for extra in (0, 400, 450, 500)[:rounds]]


async def ask_all(cluster: PairCluster) -> Asked:
    before = await moved(cluster)
    places = asyncio.Semaphore(PARALLEL)
    greedy: dict[int, Ended] = {}
    sampled: dict[int, tuple[Ended, Ended]] = {}

    async def ask(length: int) -> None:
        async with places:
            greedy[length] = await cluster.generate(prompt(length), TOKENS)

    async def sample(length: int) -> None:
        fields = {"sampling_params": {**SAMPLING, "sampling_seed": length}}
        async with places:
            pair = await cluster.generate(prompt(length), TOKENS, **fields)
            alone = await cluster.alone(prompt(length), TOKENS, **fields)
            sampled[length] = (pair, alone)

    first, second = lengths()[::2], lengths()[1::2]
    await asyncio.gather(*map(ask, first), *map(sample, second))
    await cluster.wait_idle()
    after = await moved(cluster)
    return Asked(greedy, sampled, {kind: after[kind] - before[kind] for kind in after})


async def moved(cluster: PairCluster) -> dict[str, int]:
    """What prefill has moved so far; the run's own first request is among it."""
    name = "pdcluster_kv_bytes_total"
    return {
        kind: await cluster.count("engine", name, kind=kind)
        for kind in ("kv", "metadata", "repeat")
    }


def test_greedy_tokens_are_those_of_generate(cluster: PairCluster, asked: Asked) -> None:
    assert REQUESTS // 2 == len(asked.greedy)
    for length, answer in asked.greedy.items():
        oracle = expected(cluster.model, prompt(length), TOKENS, chunk=None, tops=1)
        assert (200, True, None) == (answer.status, answer.done, answer.error), length
        assert oracle.ids == answer.ids, length


def test_seeded_samples_are_those_of_one_engine_alone(asked: Asked) -> None:
    assert REQUESTS // 2 == len(asked.sampled)
    for length, (pair, alone) in asked.sampled.items():
        assert (200, None) == (pair.status, pair.error), length
        assert alone.ids == pair.ids, length


def test_each_decode_rank_got_its_bytes_once(shape: Shape, asked: Asked) -> None:
    """Of all prompts, what every rank of decode holds; a head on two ranks comes twice."""
    layout = PagedModel(shape.model).layout
    parallel = Parallelism(**shape.decode)
    ranks = rank_coordinates(parallel, 0)
    row_bytes = sum(rank_slice(layout, parallel, r).layout.bytes_per_token for r in ranks)

    assert {
        "kv": sum(lengths()) * row_bytes,
        "metadata": REQUESTS * len(ranks) * METADATA_SLOT_BYTES,
        "repeat": 0,
    } == asked.moved


async def test_every_rank_is_linked_and_nothing_is_left(
    cluster: PairCluster, shape: Shape, asked: Asked
) -> None:
    assert asked.greedy
    for role in Role:
        parallel = Parallelism(**(shape.prefill if role is Role.PREFILL else shape.decode))
        dumps = await cluster.dumps(role)
        assert parallel.rank_count == len(dumps)
        for dump in dumps:
            assert "checked" == dump["invariants"]
            assert parallel.ranks_per_dp == len(dump["ranks"])
            assert 0 == dump["pages"]["owned"] == dump["pages"]["quarantined"]
