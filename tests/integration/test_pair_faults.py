"""Whole engines over a transport that lies: what did not land as it was said is never decoded.

Prefill writes through `FaultyTransport` over real Mooncake; router, sidecars and decode are what
they always are. Each case asks the same requests, eight at a time, while a seeded share of the
writes is broken. A request that was hit fails with its reason or has the right tokens all the same;
its neighbours have the right tokens, from a pool in which pages are handed on at once; and in the
end every page and slot is back. `PDCLUSTER_FAULT_ROUNDS` says how many seeds each case is tried
with, by default one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from pdcluster_protocol.fault_plan import Fault
from pdcluster_protocol.ids import Role
from support.cluster import TOPS, Ended, until
from support.faulty_cluster import HONEST, PAGES, FaultyCluster, injected
from support.oracle import expected
from support.prompts import prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROUNDS = int(os.environ.get("PDCLUSTER_FAULT_ROUNDS", "1"))
REQUESTS = 24
PARALLEL = 8
TOKENS = 12
PROMPTS = [
    prompt(length, seed=seed)
    for seed, length in enumerate(random.Random(5).choices(range(60, 1000), k=REQUESTS))
]
MISMATCH = "decode ChecksumMismatch"
CORRUPT = "decode MetadataCorrupt"


class Case(msgspec.Struct, frozen=True):
    """One way to lie, and how a request ends whose write was hit."""

    fault: Fault
    share: float
    end: str = ""
    """Leg and reason; empty: nobody fails, and no transfer process is replaced."""
    late_seconds: float = 0.05

    def plan(self, seed: int) -> str:
        return f"seed={seed},late={self.late_seconds},{self.fault}={self.share}"

    def hits(self, seed: int, writes: int) -> int:
        """How many of the first writes are broken, whatever they are."""
        dice = random.Random(seed)
        return sum(dice.random() < self.share for _ in range(writes))


# What failed is written again after a second; the bytes of the first try come when all is over.
ERROR = Case(Fault.ERROR_THEN_WRITE, 0.003, late_seconds=2.5)
CASES = (
    Case(Fault.FLIPPED_BYTE, 0.003, MISMATCH),
    Case(Fault.TRUNCATED_RUN, 0.003, MISMATCH),
    Case(Fault.EARLY_COMPLETION, 0.003, MISMATCH, late_seconds=0.3),
    ERROR,
    Case(Fault.LATE_WRITE, 0.05, late_seconds=0.3),
    Case(Fault.DUPLICATE, 0.2),
    Case(Fault.REORDER, 0.3),
    Case(Fault.DELAY, 0.2),
)


def fatal_seeds(case: Case) -> Iterator[int]:
    """Seeds that hit one or two requests: a fence delays, and takes a port for a minute."""
    return (
        seed
        for seed in itertools.count(1)
        if 1 <= case.hits(seed, 600) <= case.hits(seed, 1400) <= 2
    )


def runs() -> Iterator[object]:
    """Every case of every round, with its seed."""
    seeds = {
        case: fatal_seeds(case) if case.end or case is ERROR else itertools.count(1)
        for case in CASES
    }
    for _ in range(ROUNDS):
        for case in CASES:
            seed = next(seeds[case])
            yield pytest.param(case, seed, id=f"{case.fault}-{seed}")


class Outcome(msgspec.Struct, frozen=True):
    """What requests under one plan brought."""

    prompts: list[list[int]]
    ends: list[Ended]
    before: dict[Role, dict[str, float]]
    after: dict[Role, dict[str, float]]

    @property
    def failures(self) -> Counter[str]:
        """How many requests failed, by leg and reason."""
        errors = [end.error for end in self.ends if end.error is not None]
        return Counter(f"{error['leg']} {error['code']}" for error in errors)

    @property
    def wrong(self) -> int:
        """How many answers hold a token or a logprob that the oracle does not."""
        pairs = zip(self.prompts, self.ends, strict=True)
        return sum(not is_right(end, ids) for ids, end in pairs)

    def grown(self, role: Role, name: str) -> float:
        """By how much a counter grew."""
        return self.after[role].get(name, 0.0) - self.before[role].get(name, 0.0)

    @property
    def restarts(self) -> Counter[str]:
        """How often transfer processes were replaced, by role and cause."""
        name = 'pdcluster_transport_restarts_total{{cause="{}"}}'.format
        grown = {
            f"{role} {cause}": int(self.grown(role, name(cause)))
            for role in Role
            for cause in ("fence", "death")
        }
        return +Counter(grown)

    def injected(self, fault: Fault) -> float:
        """How many writes were broken."""
        return injected(self.after[Role.PREFILL], fault) - injected(
            self.before[Role.PREFILL], fault
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultyCluster]:
    with FaultyCluster() as started:
        yield started


@pytest.fixture(scope="module")
def unverified() -> Iterator[FaultyCluster]:
    with FaultyCluster(checksum="Off") as started:
        yield started


@pytest.mark.parametrize(("case", "seed"), [*runs()])
async def test_a_broken_write_is_never_decoded(
    cluster: FaultyCluster, case: Case, seed: int
) -> None:
    outcome = await ask(cluster, case.plan(seed))
    show(case.plan(seed), outcome, case.fault)
    broken, failures = outcome.injected(case.fault), outcome.failures

    assert 0 < broken
    assert 0 == outcome.wrong
    assert all(end.clear for end in outcome.ends)
    await assert_nothing_is_left(cluster)
    if not case.end:
        assert not failures
        # A first try that still flies reads prefill's pages and lands in decode's.
        fences = {"prefill fence", "decode fence"} if case is ERROR else set()
        assert fences == outcome.restarts.keys()
        return
    assert {case.end} == failures.keys()
    assert failures.total() <= broken
    afterwards = await ask(cluster, HONEST)
    assert (0, Counter()) == (afterwards.wrong, afterwards.failures)


async def test_decode_maps_its_memory_anew_when_bytes_are_not_there(cluster: FaultyCluster) -> None:
    """They may still come, among a neighbour's: who said that they are there proves nothing."""
    outcome = await ask(cluster, "seed=1,late=0.5,EarlyCompletion=1", [max(PROMPTS, key=len)])
    neighbours = await ask(cluster, HONEST)

    assert Counter({MISMATCH: 1}) == outcome.failures
    assert (0, Counter()) == (neighbours.wrong, neighbours.failures)
    assert Counter({"decode fence": 1}) == outcome.restarts


async def test_a_second_answer_to_one_write_is_counted_and_dropped(cluster: FaultyCluster) -> None:
    outcome = await ask(cluster, "seed=3,Duplicate=0.1")

    unknown = 'pdcluster_dropped_total{what="operation_unknown"}'
    # Writes to a session that was fenced before may end meanwhile, and are unknown too.
    assert 0 < outcome.injected(Fault.DUPLICATE) <= outcome.grown(Role.PREFILL, unknown)
    assert 0 == outcome.wrong


@pytest.mark.parametrize(
    ("late_seconds", "fenced"), [(1.0, False), (6.0, True)], ids=["drained", "fenced"]
)
async def test_what_lands_after_its_clients_left_harms_no_neighbour(
    cluster: FaultyCluster, *, late_seconds: float, fenced: bool
) -> None:
    """Pages are quarantined until the writer has drained, or else until decode has fenced."""
    before = {role: await cluster.metrics(role) for role in Role}
    cluster.plan(f"seed=7,late={late_seconds},LateWrite=0.5")
    leaving = [asyncio.create_task(cluster.stream(ids, TOKENS)) for ids in PROMPTS[:4]]
    await until(lambda: were_injected(cluster, before, Fault.LATE_WRITE), "late writes")
    cluster.plan(HONEST)
    for client in leaving:
        client.cancel()
    await asyncio.wait(leaving)
    await until(lambda: are_quarantined(cluster), "quarantined pages")

    outcome = await ask(cluster, HONEST)

    assert all(client.cancelled() for client in leaving)
    assert 0 == outcome.wrong
    assert not outcome.failures
    await assert_nothing_is_left(cluster)
    fences = 'pdcluster_transport_restarts_total{cause="fence"}'
    assert fenced == (
        outcome.after[Role.DECODE].get(fences, 0) > before[Role.DECODE].get(fences, 0)
    )


async def test_a_transport_that_lies_can_be_seen_from_outside(cluster: FaultyCluster) -> None:
    assert (await cluster.server_information(Role.PREFILL))["pd_faults"].startswith("@")
    assert "" == (await cluster.server_information(Role.DECODE))["pd_faults"]
    assert not any("injected_faults" in name for name in await cluster.metrics(Role.DECODE))
    assert '"transport_faults_on_purpose"' in cluster.logs()


async def test_without_verification_the_oracle_sees_the_flipped_bytes(
    unverified: FaultyCluster,
) -> None:
    """The control: these tests can fail, and it is the checksum that makes them pass."""
    outcome = await ask(unverified, "seed=7,FlippedByte=0.05")

    show("not verified, FlippedByte", outcome, Fault.FLIPPED_BYTE)
    assert 0 < outcome.wrong
    assert outcome.failures.keys() <= {CORRUPT}
    await assert_nothing_is_left(unverified)


async def test_without_verification_what_has_not_landed_is_still_not_decoded(
    unverified: FaultyCluster,
) -> None:
    """Coverage and the order of the statuses: they hold as long as `ok` means landed."""
    outcome = await ask(unverified, "seed=7,late=0.3,LateWrite=0.05,Reorder=0.1,Delay=0.05")

    assert 0 < outcome.injected(Fault.LATE_WRITE)
    assert 0 == outcome.wrong
    assert not outcome.failures
    await assert_nothing_is_left(unverified)


async def test_without_verification_only_the_echo_of_the_room_finds_an_early_completion(
    unverified: FaultyCluster,
) -> None:
    """It covers the metadata row alone: KV rows that were completed early would be read."""
    outcome = await ask(unverified, "seed=7,late=0.5,EarlyCompletion=1")

    assert Counter({CORRUPT: REQUESTS}) == outcome.failures
    assert 0 == outcome.wrong
    await assert_nothing_is_left(unverified)


async def ask(cluster: FaultyCluster, plan: str, prompts: list[list[int]] = PROMPTS) -> Outcome:
    """Requests under a plan, a few at a time; returns when nothing is left of them."""
    before = {role: await cluster.metrics(role) for role in Role}
    places = asyncio.Semaphore(PARALLEL)

    async def one(ids: list[int]) -> Ended:
        async with places:
            return await cluster.generate(ids, TOKENS)

    cluster.plan(plan)
    ends = await asyncio.gather(*(one(ids) for ids in prompts))
    cluster.plan(HONEST)
    await cluster.wait_idle()
    after = {role: await cluster.metrics(role) for role in Role}
    return Outcome(prompts, ends, before, after)


def is_right(end: Ended, ids: list[int]) -> bool:
    """Whether the tokens and logprobs of an answer are those of the library's `generate`."""
    oracle = expected("tiny-llama", ids, TOKENS, chunk=100, tops=TOPS)
    count = TOKENS if end.done else len(end.ids)
    return (oracle.ids[:count], oracle.tops[:count]) == (end.ids, end.tops)


def show(plan: str, outcome: Outcome, fault: Fault) -> None:
    """The counts of one run, with its seed."""
    right = sum(end.done for end in outcome.ends) - outcome.wrong
    sys.stdout.write(
        f"{plan}: {outcome.injected(fault):.0f} writes broken; {right} answers right,"
        f" {outcome.wrong} wrong, failed {dict(outcome.failures)};"
        f" transfer processes replaced {dict(outcome.restarts)}\n"
    )


async def assert_nothing_is_left(cluster: FaultyCluster) -> None:
    """Every page and slot is free, and no engine was restarted to get there."""
    for role in Role:
        dump = await cluster.dump(role)
        assert "checked" == dump["invariants"]
        assert {"free": PAGES[role], "owned": 0, "quarantined": 0} == dump["pages"]
        assert 0 == cluster.process(f"{role}/engine").restarts


async def were_injected(
    cluster: FaultyCluster, before: dict[Role, dict[str, float]], fault: Fault
) -> bool:
    now = await cluster.metrics(Role.PREFILL)
    return injected(now, fault) - injected(before[Role.PREFILL], fault) >= PARALLEL


async def are_quarantined(cluster: FaultyCluster) -> bool:
    return (await cluster.metrics(Role.DECODE))['pdcluster_pages{state="quarantined"}'] > 0
