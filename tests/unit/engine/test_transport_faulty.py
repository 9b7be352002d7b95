"""Each injected fault is the lie it claims to be, and a seed repeats it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import xxhash

from pdcluster_engine.transport.faulty import Fault, FaultPlan, FaultyTransport
from pdcluster_engine.transport.local import LocalTransport
from pdcluster_engine.transport.port import Completed, Deadlines, DigestRequest, Fenced, Ready
from support.arenas import Side, memfd

NBYTES = 64 << 10
SEED = 11


@contextmanager
def side_with(shares: dict[Fault, float], *, seed: int = SEED) -> Iterator[Side]:
    with memfd(NBYTES) as fd:
        inner = LocalTransport(arena_fd=fd, arena_nbytes=NBYTES, deadlines=Deadlines())
        plan = FaultPlan(seed=seed, shares=shares)
        transport = FaultyTransport(inner, plan, arena_fd=fd, arena_nbytes=NBYTES)
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


def test_reordered_answers_all_come_once(receiver: Side) -> None:
    with side_with({Fault.REORDER: 0.5}) as sender:
        peer = receiver.wait(Ready)
        order = [
            sender.write(peer, source=i * 64, destination=i * 64, nbytes=64) for i in range(50)
        ]
        got = list(sender.wait_completed(50, receiver))
        sender.transport.submit(DigestRequest(99, 0, 8))
        assert 99 == sender.wait(Completed).operation
        assert order == sorted(got)
        assert order != got


def test_an_early_completion_has_the_right_digest_and_no_bytes_yet(receiver: Side) -> None:
    with side_with(always(Fault.EARLY_COMPLETION)) as sender:
        content = sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        completed = sender.wait(Completed)
        assert (True, xxhash.xxh3_64_intdigest(content)) == (completed.ok, completed.digest)
        assert bytes(NBYTES) == receiver.read()
        wait_for_content(receiver, content, sender)


def test_a_late_write_lands_what_the_source_holds_by_then(receiver: Side) -> None:
    with side_with(always(Fault.LATE_WRITE)) as sender:
        old = sender.fill(1)
        sender.write(receiver.wait(Ready), source=0, destination=0, nbytes=NBYTES)
        assert sender.wait(Completed, receiver).ok
        assert old == receiver.read()
        wait_for_content(receiver, sender.fill(2), sender)


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
    shares = dict.fromkeys(Fault, 1 / 8)
    runs = []
    for seed in (SEED, SEED, SEED + 1):
        with side_with(shares, seed=seed) as sender:
            assert isinstance(sender.transport, FaultyTransport)
            for _ in range(40):
                sender.write(peer, source=0, destination=0, nbytes=64)
            runs.append(sender.transport.injected)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert set(Fault) == {injected.fault for injected in runs[0]}


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1"):
        FaultPlan(seed=1, shares={Fault.DROP: 0.7, Fault.DELAY: 0.7})


def wait_for_content(receiver: Side, content: bytes, sender: Side) -> None:
    for _ in range(100):
        if content == receiver.read():
            return
        sender.pump(0.02)
        receiver.pump(0.02)
    raise AssertionError("the bytes never came")
