"""Tokens over two processes are those of `transformers`' own `generate`, and only KV rows moved.

Each cluster runs sixteen requests, eight at a time, once; the tests look at what came of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from pdcluster_engine.memory.metadata import METADATA_SLOT_BYTES
from pdcluster_protocol.ids import Role
from support.cluster import TOPS, Ended, PairCluster
from support.model_runs import PagedModel
from support.oracle import Expected, expected
from support.prompts import prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CLUSTERS = (
    ("tiny-glm", "exact", 100),
    ("tiny-glm", "batched", 7),
    ("tiny-llama", "exact", 7),
    ("tiny-llama", "batched", 100),
)
LONG = 6401
"""More than 100 pages of 64 tokens, and one token more."""
LENGTHS = (LONG, 1, 63, 64, 65, 127, 128, 129, 1000, 2, 7, 99, 101, 192, 333, 500)
PARALLEL = 8
TOKENS = 12


class Sixteen(msgspec.Struct, frozen=True):
    """What sixteen requests brought."""

    answers: dict[int, Ended]
    """By prompt length."""
    pages: dict[Role, dict[int, str]]
    """Page numbers that dumps showed while the requests ran, by prompt length."""
    before: dict[Role, dict[str, float]]
    after: dict[Role, dict[str, float]]

    def grown(self, role: Role, name: str) -> float:
        """By how much a counter grew."""
        return self.after[role].get(name, 0.0) - self.before[role].get(name, 0.0)


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda case: "-".join(map(str, case)))
def cluster(request: pytest.FixtureRequest) -> Iterator[PairCluster]:
    model, mode, chunk = request.param
    with PairCluster(model=model, mode=mode, chunk=chunk) as started:
        yield started


@pytest.fixture(scope="module")
def sixteen(cluster: PairCluster) -> Sixteen:
    return asyncio.run(run_sixteen(cluster))


async def run_sixteen(cluster: PairCluster) -> Sixteen:
    before = {role: await cluster.metrics(role) for role in Role}
    places = asyncio.Semaphore(PARALLEL)
    answers: dict[int, Ended] = {}

    async def ask(length: int) -> None:
        async with places:
            answers[length] = await cluster.generate(prompt(length), TOKENS)

    pages: dict[Role, dict[int, str]] = {role: {} for role in Role}
    asked = asyncio.gather(*(ask(length) for length in LENGTHS))
    watching = asyncio.create_task(watch_pages(cluster, pages))
    await asked
    watching.cancel()
    await asyncio.wait([watching])
    await cluster.wait_idle()
    after = {role: await cluster.metrics(role) for role in Role}
    return Sixteen(answers, pages, before, after)


async def watch_pages(cluster: PairCluster, pages: dict[Role, dict[int, str]]) -> None:
    """Note the page numbers of every room that a dump shows, until cancelled."""
    while True:
        for role in Role:
            try:
                dump: dict[str, Any] = await cluster.dump(role)
            except aiohttp.ClientError:
                continue
            for room in dump.get("rooms", ()):
                if room["pages"]:
                    pages[role][room["prompt_tokens"]] = room["pages"]


def oracle(cluster: PairCluster, length: int) -> Expected:
    # Whole prompts for mode batched: how they are cut must not change a token. The long one would
    # need gigabytes in one piece.
    whole = cluster.mode == "batched" and length < LONG
    chunk = None if whole else cluster.chunk
    return expected(cluster.model, prompt(length), TOKENS, chunk=chunk, tops=TOPS)


def test_every_request_has_the_tokens_of_generate(cluster: PairCluster, sixteen: Sixteen) -> None:
    assert sorted(LENGTHS) == sorted(sixteen.answers)
    for length, answer in sixteen.answers.items():
        assert (200, True, None) == (answer.status, answer.done, answer.error), length
        assert oracle(cluster, length).ids == answer.ids, length


def test_top_logprobs_are_those_of_generate(cluster: PairCluster, sixteen: Sixteen) -> None:
    """As exact floats in mode exact, the first of them from prefill and the rest from decode."""
    for length, answer in sixteen.answers.items():
        wanted = oracle(cluster, length).tops
        assert (TOKENS, TOPS) == (len(answer.tops), len(answer.tops[0]))
        if cluster.mode == "exact":
            assert wanted == answer.tops, length
        else:
            for step, seen in zip(wanted, answer.tops, strict=True):
                for (one, _), (other, _) in zip(step, seen, strict=True):
                    assert math.isclose(one, other, abs_tol=1e-4), length


def test_page_numbers_differ_between_the_sides_and_do_not_follow_each_other(
    sixteen: Sixteen,
) -> None:
    seen = {role: numbers(sixteen.pages[role].get(LONG, "")) for role in Role}
    for role in Role:
        assert 100 < len(seen[role]), role
        neighbours = sum(b == a + 1 for a, b in zip(seen[role], seen[role][1:], strict=False))
        assert neighbours < len(seen[role]) // 10, role
    # Decode's last page is for the answer.
    length = min(map(len, seen.values()))
    same = sum(a == b for a, b in zip(*(pages[:length] for pages in seen.values()), strict=True))
    assert same < length // 10


def numbers(runs: str) -> list[int]:
    """The pages behind `3-7 12`."""
    pages: list[int] = []
    for run in runs.split():
        first, _, last = run.partition("-")
        pages += range(int(first), int(last or first) + 1)
    return pages


def test_moved_bytes_are_the_rows_of_all_prompts_and_decode_computed_none(
    cluster: PairCluster, sixteen: Sixteen
) -> None:
    tokens = sum(LENGTHS)
    moved = tokens * PagedModel(cluster.model).layout.bytes_per_token
    rows = len(LENGTHS) * METADATA_SLOT_BYTES
    assert moved == sixteen.grown(Role.PREFILL, 'pdcluster_kv_bytes_total{kind="kv"}')
    assert rows == sixteen.grown(Role.PREFILL, 'pdcluster_kv_bytes_total{kind="metadata"}')
    kinds = {name for name in sixteen.after[Role.PREFILL] if "kv_bytes_total" in name}
    assert kinds == {f'pdcluster_kv_bytes_total{{kind="{kind}"}}' for kind in ("kv", "metadata")}

    computed = "pdcluster_prompt_tokens_computed_total"
    assert tokens == sixteen.grown(Role.PREFILL, computed)
    assert 0 == sixteen.grown(Role.DECODE, computed)
    # Of each answer prefill chose the first token, decode all others.
    chosen = "pdcluster_tokens_generated_total"
    assert len(LENGTHS) == sixteen.grown(Role.PREFILL, chosen)
    assert len(LENGTHS) * (TOKENS - 1) == sixteen.grown(Role.DECODE, chosen)


async def test_nothing_is_left_and_every_event_was_checked(
    cluster: PairCluster, sixteen: Sixteen
) -> None:
    assert sixteen.answers
    for role in Role:
        dump = await cluster.dump(role)
        assert "checked" == dump["invariants"]
        assert ([], 0, 0) == (dump["rooms"], dump["queued"], dump["legs"])
        assert 0 == dump["pages"]["owned"] == dump["pages"]["quarantined"]
        assert sixteen.before[role]['pdcluster_pages{state="free"}'] == dump["pages"]["free"]
        assert 0 == cluster.process(f"{role}/engine").restarts
