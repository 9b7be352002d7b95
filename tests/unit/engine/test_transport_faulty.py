"""Each injected fault is the lie it claims to be, and a seed repeats it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import xxhash

from pdcluster_engine.transport.faulty import FaultyTransport, Injected
from pdcluster_engine.transport.local import LocalTransport
from pdcluster_engine.transport.port import (
    Completed,
    Deadlines,
    DigestRequest,
    Fenced,
    Ready,
    WriteRequest,
)
from pdcluster_protocol.fault_plan import Fault, FaultPlan
from support.arenas import Side, memfd

NBYTES = 64 << 10
SEED = 11


@contextmanager
def side_with(
    shares: dict[Fault, float],
    *,
    seed: int = SEED,
    told: Callable[[Injected], None] = lambda _: None,
    renewed: Callable[[], FaultPlan | None] = lambda: None,
) -> Iterator[Side]:
    with memfd(NBYTES) as fd:
        inner = LocalTransport(arena_fd=fd, arena_nbytes=NBYTES, deadlines=Deadlines())
        plan = FaultPlan(seed=seed, shares=shares)
        transport = FaultyTransport(
            inner, plan, arena_fd=fd, arena_nbytes=NBYTES, told=told, renewed=renewed
        )
        try:
            transport.start()
            yield Side(transport, fd, NBYTES)
        finally:
            transport.close()


@pytest.fixture
def receiver() -> Iterator[Side]:
    with side_with({}) as side:
        yield side


def always(fault: Fault) -> dict[Fault, float]:
    return {fault: 1.0}


def test_without_shares_nothing_is_injected(receiver: Side) -> None:
    with side_with({}) as sender:
        content = sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        assert sender.wait(Completed, receiver).ok
        assert content == receiver.read()


def test_a_dropped_write_neither_lands_nor_ends_but_a_fence_frees_it(receiver: Side) -> None:
    with side_with(always(Fault.DROP)) as sender:
        sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        sender.transport.submit(DigestRequest(99, 0, 8))
        assert 99 == sender.wait(Completed, receiver).operation
        sender.transport.fence()
        sender.wait(Fenced)
        assert bytes(NBYTES) == receiver.read()
        assert [99] == [e.operation for e in sender.seen if isinstance(e, Completed)]


def test_a_delayed_answer_comes_after_a_later_digest(receiver: Side) -> None:
    with side_with(always(Fault.DELAY)) as sender:
        first = sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=64)
        sender.transport.submit(DigestRequest(99, 0, 8))
        assert [99, first] == list(sender.wait_completed(2, receiver))


def test_a_reordered_write_lands_over_the_next_one(receiver: Side) -> None:
    """Every other write is told to go first; both go to one place, so the last one is seen."""
    dice = iter([FaultPlan(SEED, always(Fault.REORDER)), FaultPlan(SEED, {})])
    with side_with({}, renewed=lambda: next(dice)) as sender:
        peer, content = receiver.wait(Ready), sender.fill(1)
        first = sender.write(peer, source=0, destination=0, nbytes=64)
        second = sender.write(peer, source=64, destination=0, nbytes=64)
        assert [second, first] == list(sender.wait_completed(2, receiver))
        assert content[:64] == receiver.read(0, 64)


def test_a_reordered_write_without_a_next_one_is_only_late(receiver: Side) -> None:
    with side_with(always(Fault.REORDER)) as sender:
        content = sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        assert sender.wait(Completed, receiver).ok
        assert content == receiver.read()


def test_reordered_writes_all_land_and_are_answered_once(receiver: Side) -> None:
    with side_with({Fault.REORDER: 0.5}) as sender:
        peer, content = receiver.wait(Ready), sender.fill(1)
        order = [
            sender.write(peer, source=i * 64, destination=i * 64, nbytes=64) for i in range(50)
        ]
        got = list(sender.wait_completed(50, receiver))
        sender.transport.submit(DigestRequest(99, 0, 8))
        assert 99 == sender.wait(Completed).operation
        assert order == sorted(got)
        assert order != got
        assert content[: 50 * 64] == receiver.read(0, 50 * 64)


def test_a_duplicate_lands_twice_before_it_is_answered_twice(receiver: Side) -> None:
    with side_with(always(Fault.DUPLICATE)) as sender:
        content = sender.fill(1)
        operation = sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        answers = [sender.wait(Completed, receiver) for _ in range(2)]
        assert [(operation, True)] * 2 == [(one.operation, one.ok) for one in answers]
        sender.fill(2)
        sender.transport.submit(DigestRequest(99, 0, 8))
        assert 99 == sender.wait(Completed, receiver).operation
        receiver.pump(0.1)
        assert content == receiver.read()


@pytest.mark.parametrize("pieces", [1, 4])
def test_of_a_truncated_run_the_first_half_lands(receiver: Side, pieces: int) -> None:
    with side_with(always(Fault.TRUNCATED_RUN)) as sender:
        content, peer = sender.fill(1), receiver.wait(Ready)
        sender.transport.submit(
            WriteRequest(
                operation=1,
                target=peer.session_name,
                source_offset=0,
                destination_address=peer.base_address,
                nbytes=1000 // pieces,
                digest=True,
                pieces=pieces,
                source_stride=1000 // pieces,
                destination_stride=1000 // pieces,
            )
        )
        completed = sender.wait(Completed, receiver)
        digest = xxhash.xxh3_64_intdigest(content[:1000])
        assert (True, digest) == (completed.ok, completed.digest)
        assert content[:500] + bytes(500) == receiver.read(0, 1000)


def test_an_early_completion_has_the_right_digest_and_no_bytes_yet(receiver: Side) -> None:
    with side_with(always(Fault.EARLY_COMPLETION)) as sender:
        content = sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        completed = sender.wait(Completed)
        assert (True, xxhash.xxh3_64_intdigest(content)) == (completed.ok, completed.digest)
        assert bytes(NBYTES) == receiver.read()
        wait_for_content(receiver, content, sender)


def test_a_late_write_is_answered_when_it_has_landed(receiver: Side) -> None:
    with side_with(always(Fault.LATE_WRITE)) as sender:
        content = sender.fill(1)
        operation = sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        sender.transport.submit(DigestRequest(99, 0, 8))
        assert 99 == sender.wait(Completed, receiver).operation
        assert bytes(NBYTES) == receiver.read()
        assert operation == sender.wait(Completed, receiver).operation
        assert content == receiver.read()


def test_a_failed_answer_is_followed_by_the_bytes(receiver: Side) -> None:
    with side_with(always(Fault.ERROR_THEN_WRITE)) as sender:
        content = sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        assert not sender.wait(Completed).ok
        wait_for_content(receiver, content, sender)


def test_a_flipped_byte_is_there_before_the_answer_and_the_digest_finds_it(receiver: Side) -> None:
    with side_with(always(Fault.FLIPPED_BYTE)) as sender:
        content = sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        completed = sender.wait(Completed, receiver)
        landed = receiver.read()
        assert (True, xxhash.xxh3_64_intdigest(content)) == (completed.ok, completed.digest)
        assert 1 == sum(a != b for a, b in zip(content, landed, strict=True))


def test_a_fence_ends_what_is_held_back(receiver: Side) -> None:
    with side_with(always(Fault.ERROR_THEN_WRITE)) as sender:
        sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        assert not sender.wait(Completed).ok
        sender.transport.fence()
        sender.wait(Fenced)
        sender.pump(0.1)
        receiver.pump(0.1)
        assert bytes(NBYTES) == receiver.read()


def test_the_same_seed_injects_the_same_faults(receiver: Side) -> None:
    peer = receiver.wait(Ready)
    shares = dict.fromkeys(Fault, 1 / 10)
    runs: list[list[Injected]] = []
    for seed in (SEED, SEED, SEED + 1):
        runs.append([])
        with side_with(shares, seed=seed, told=runs[-1].append) as sender:
            for _ in range(60):
                sender.write(peer, source=0, destination=0, nbytes=64)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert set(Fault) == {injected.fault for injected in runs[0]}


def test_a_renewed_plan_holds_from_the_next_write_on(receiver: Side) -> None:
    told: list[Injected] = []
    plans: list[FaultPlan | None] = [None, FaultPlan(SEED, always(Fault.DROP)), None]
    with side_with({}, told=told.append, renewed=lambda: plans.pop(0)) as sender:
        peer = receiver.wait(Ready)
        for _ in range(3):
            sender.write(peer, source=0, destination=0, nbytes=64)
        assert [Injected(2, Fault.DROP), Injected(3, Fault.DROP)] == told


def wait_for_content(receiver: Side, content: bytes, sender: Side) -> None:
    for _ in range(100):
        if content == receiver.read():
            return
        sender.pump(0.02)
        receiver.pump(0.02)
    raise AssertionError("the bytes never came")
