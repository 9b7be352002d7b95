"""Real transfer processes over Mooncake TCP on loopback."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from pdcluster_engine.transport.port import (
    Completed,
    Died,
    DigestRequest,
    Fenced,
    Ready,
    WriteRequest,
)
from pdcluster_protocol.errors import TransportError
from support.arenas import Side, mooncake_side
from support.ports import fresh_host

SENDER, RECEIVER, THIRD = (fresh_host() for _ in range(3))
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def sender() -> Iterator[Side]:
    with mooncake_side(SENDER) as side:
        yield side


@pytest.fixture
def receiver() -> Iterator[Side]:
    with mooncake_side(RECEIVER) as side:
        yield side


def test_bytes_land_and_the_digests_of_both_sides_are_equal(sender: Side, receiver: Side) -> None:
    content = sender.fill(1)
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    for nbytes in (1, 63, 4 * KIB, 64 * KIB + 1, 4 * MIB):
        operation = sender.write(peer, source=5, destination=7, nbytes=nbytes)
        written = sender.wait(Completed)
        receiver.transport.submit(DigestRequest(operation=nbytes, offset=7, nbytes=nbytes))
        assert (operation, True) == (written.operation, written.ok)
        assert written.digest == receiver.wait(Completed).digest
        assert content[5 : 5 + nbytes] == receiver.read(7, nbytes)
    assert bytes(7) == receiver.read(0, 7)


def test_thousands_of_pieces_of_one_operation_land_and_end_as_one(
    sender: Side, receiver: Side
) -> None:
    pieces, nbytes, far, near = 4096, 256, 1024, 512
    content = sender.fill(9)
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    base = peer.base_address + 40
    sender.transport.submit(
        WriteRequest(1, peer.session_name, 5, base, nbytes, True, pieces, far, near)
    )
    written = sender.wait(Completed)
    receiver.transport.submit(DigestRequest(2, 40, nbytes, pieces, near))
    assert (1, True) == (written.operation, written.ok)
    assert written.digest == receiver.wait(Completed).digest
    expected = bytearray(receiver.nbytes)
    for i in range(pieces):
        place, origin = 40 + i * near, 5 + i * far
        expected[place : place + nbytes] = content[origin : origin + nbytes]
    assert bytes(expected) == receiver.read()
    last = receiver.nbytes - (pieces - 1) * near - nbytes
    beyond = peer.base_address + last + 1
    sender.transport.submit(
        WriteRequest(3, peer.session_name, 5, beyond, nbytes, True, pieces, far, near)
    )
    completed = sender.wait(Completed)
    assert (3, False) == (completed.operation, completed.ok)
    sender.write(peer, source=0, destination=0, nbytes=64)
    assert sender.wait(Completed).ok


@pytest.mark.parametrize("seed", [20])
def test_thousands_of_writes_of_many_sizes_end_right(
    sender: Side, receiver: Side, seed: int
) -> None:
    chance = random.Random(seed)
    content = bytearray(sender.fill(2))
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    expected = bytearray(receiver.nbytes)
    for _ in range(4):
        # Within a round no two writes overlap, so their order does not matter.
        place, count = 0, 0
        while place < sender.nbytes:
            nbytes = min(chance.choice((4, 4, 8, 16, 64, 1024)) * KIB, sender.nbytes - place)
            sender.write(peer, source=place, destination=place, nbytes=nbytes, digest=False)
            place, count = place + nbytes, count + 1
        expected[:] = content
        assert {True} == {c.ok for c in sender.wait_completed(count).values()}
        assert bytes(expected) == receiver.read()
        content = bytearray(sender.fill(chance.randrange(1 << 30)))
    for _ in range(2000):
        sender.write(peer, source=0, destination=0, nbytes=16 * KIB)
    assert {True} == {c.ok for c in sender.wait_completed(2000).values()}


def test_what_is_submitted_before_ready_is_held_and_completes(sender: Side, receiver: Side) -> None:
    peer = receiver.wait(Ready)
    sender.write(peer, source=0, destination=0, nbytes=4 * KIB)
    assert sender.wait(Completed).ok
    assert isinstance(sender.seen[0], Ready)


def test_own_bytes_outside_the_arena_are_refused_before_anything_is_sent(sender: Side) -> None:
    ready = sender.wait(Ready)
    for source, nbytes in ((sender.nbytes, 1), (0, sender.nbytes + 1), (-1, 4), (0, 0), (9, -1)):
        with pytest.raises(TransportError, match="the arena has"):
            sender.write(ready, source=source, destination=0, nbytes=nbytes)


@pytest.mark.parametrize(
    ("target", "address", "cause"),
    [
        (None, 0, "impossible"),
        (None, -5, "impossible"),
        (None, (1 << 64) - 4, "impossible"),
        (None, 1 << 70, "impossible"),
        ("", 4096, "not a session name"),
        ("x" * 5000, 4096, "not a session name"),
        ("nowhere", 4096, "not host:port"),
        ("127.64.1.9:99999", 4096, "not host:port"),
        ("127.64.1.9:15999", 4096, "connection refused"),
        (None, 4096, "not within its registered memory"),
    ],
)
def test_what_a_peer_said_wrongly_fails_its_write_and_raises_nothing(
    sender: Side, receiver: Side, target: str | None, address: int, cause: str
) -> None:
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    session = peer.session_name if target is None else target
    sender.transport.submit(WriteRequest(7, session, 0, address, 64, True))
    completed = sender.wait(Completed)
    assert (7, False) == (completed.operation, completed.ok)
    assert cause in completed.detail
    sender.write(peer, source=0, destination=0, nbytes=64)
    assert sender.wait(Completed).ok


def test_a_write_beyond_the_peers_arena_lands_nothing(sender: Side, receiver: Side) -> None:
    sender.fill(3)
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    before = receiver.digest()
    sender.write(peer, source=0, destination=receiver.nbytes - 10, nbytes=11)
    assert not sender.wait(Completed).ok
    assert before == receiver.digest()


def test_killing_the_transfer_process_is_told_and_a_new_one_serves(
    sender: Side, receiver: Side
) -> None:
    sender.fill(4)
    first = sender.wait(Ready)
    peer = receiver.wait(Ready)
    for _ in range(64):
        sender.write(peer, source=0, destination=0, nbytes=16 * MIB)
    os.kill(sender.pid, signal.SIGKILL)
    died = sender.wait(Died)
    second = sender.wait(Ready)
    assert (1, False) == (died.generation, died.final)
    assert "SIGKILL" in died.detail
    assert 2 == second.generation
    assert second.session_name != first.session_name or second.base_address != first.base_address
    operation = sender.write(peer, source=0, destination=0, nbytes=16 * MIB)
    completed = sender.wait_completed_of(operation)
    assert completed.ok
    assert sender.read() == receiver.read()


def test_a_killed_peer_fails_its_writes_soon_and_hurts_no_other(
    sender: Side, receiver: Side
) -> None:
    with mooncake_side(THIRD) as third:
        sender.wait(Ready)
        peer, other = receiver.wait(Ready), third.wait(Ready)
        sender.write(peer, source=0, destination=0, nbytes=64)
        assert sender.wait(Completed).ok
        for _ in range(20):
            sender.write(peer, source=0, destination=0, nbytes=16 * MIB)
        os.kill(receiver.pid, signal.SIGKILL)
        began = time.monotonic()
        ended = sender.wait_completed(20)
        assert 8.0 > time.monotonic() - began
        assert not all(completed.ok for completed in ended.values())
        assert all(RECEIVER in c.detail for c in ended.values() if not c.ok)
        sender.write(other, source=0, destination=0, nbytes=64)
        assert sender.wait(Completed).ok
        assert [] == [event for event in sender.seen if isinstance(event, Died)]


def test_after_a_fence_of_the_receiver_no_late_write_changes_its_arena(
    sender: Side, receiver: Side
) -> None:
    sender.fill(5)
    sender.wait(Ready)
    old = receiver.wait(Ready)
    sender.write(old, source=0, destination=0, nbytes=64 * KIB)
    assert sender.wait(Completed).ok
    # A stopped receiver leaves the sender's bytes in the kernel, where only a fence catches them.
    os.kill(receiver.pid, signal.SIGSTOP)
    for _ in range(8):
        sender.write(old, source=0, destination=0, nbytes=8 * MIB)
    sender.pump(0.3)
    receiver.transport.fence()
    assert 1 == receiver.wait(Fenced).generation
    cleared = bytes(receiver.nbytes)
    os.pwrite(receiver.arena_fd, cleared, 0)
    new = receiver.wait(Ready)
    assert abs(new.base_address - old.base_address) >= receiver.nbytes
    assert {False} == {c.ok for c in sender.wait_completed(8, receiver).values()}
    # Old addresses at the new session's name, as if the new process had drawn the old port.
    mixed = Ready(new.session_name, old.base_address, old.version, 2)
    sender.write(mixed, source=0, destination=0, nbytes=64 * KIB)
    assert not sender.wait(Completed, receiver).ok
    assert cleared == receiver.read()
    sender.write(new, source=0, destination=0, nbytes=64 * KIB)
    assert sender.wait(Completed, receiver).ok


def test_after_a_fence_of_the_sender_its_reused_source_never_travels(
    sender: Side, receiver: Side
) -> None:
    old, new = b"\x11", b"\xee"
    os.pwrite(sender.arena_fd, old * sender.nbytes, 0)
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    sender.write(peer, source=0, destination=0, nbytes=64)
    assert sender.wait(Completed).ok
    os.kill(receiver.pid, signal.SIGSTOP)
    for _ in range(16):
        sender.write(peer, source=0, destination=0, nbytes=16 * MIB)
    sender.pump(0.3)
    sender.transport.fence()
    sender.wait(Fenced)
    os.pwrite(sender.arena_fd, new * sender.nbytes, 0)
    os.kill(receiver.pid, signal.SIGCONT)
    sender.wait(Ready)
    # A write of one byte through the new session ends after the resumed receiver works again.
    sender.write(peer, source=0, destination=receiver.nbytes - 1, nbytes=1)
    assert sender.wait(Completed).ok
    assert set(receiver.read(0, receiver.nbytes - 1)) <= {0, old[0]}


def test_a_hung_peer_fails_its_writes_and_stays_reachable_after_it_resumes(
    sender: Side, receiver: Side
) -> None:
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    sender.write(peer, source=0, destination=0, nbytes=64)
    assert sender.wait(Completed).ok
    os.kill(receiver.pid, signal.SIGSTOP)
    # Until it has stopped a write this short might still land.
    os.waitid(os.P_PID, receiver.pid, os.WSTOPPED | os.WNOWAIT)
    sender.write(peer, source=0, destination=0, nbytes=256 * KIB)
    completed = sender.wait(Completed)
    assert not completed.ok
    assert "no byte for 3 s" in completed.detail
    os.kill(receiver.pid, signal.SIGCONT)
    sender.write(peer, source=0, destination=0, nbytes=16 * MIB)
    assert sender.wait(Completed).ok
    assert [] == [event for event in sender.seen if isinstance(event, Died)]
