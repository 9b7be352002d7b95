"""The local twin keeps the port's promises, in one process and without a library."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import xxhash

from pdcluster_engine.transport.local import LocalTransport
from pdcluster_engine.transport.port import (
    Completed,
    Deadlines,
    Died,
    DigestRequest,
    Fenced,
    Ready,
    WriteRequest,
)
from pdcluster_protocol.errors import TransportError
from support.arenas import Side, memfd, open_descriptors

NBYTES = 4 << 20


@contextmanager
def local_side(*, operations_max: int = 65536, base_seconds: float = 10.0) -> Iterator[Side]:
    with memfd(NBYTES) as fd:
        transport = LocalTransport(
            arena_fd=fd,
            arena_nbytes=NBYTES,
            deadlines=Deadlines(base_seconds=base_seconds),
            operations_max=operations_max,
        )
        try:
            yield Side(transport, fd, NBYTES)
        finally:
            transport.close()


@pytest.fixture
def sender() -> Iterator[Side]:
    with local_side() as side:
        side.transport.start()
        yield side


@pytest.fixture
def receiver() -> Iterator[Side]:
    with local_side() as side:
        side.transport.start()
        yield side


def test_bytes_land_and_the_digest_is_the_sources(sender: Side, receiver: Side) -> None:
    content = sender.fill(1)
    peer = receiver.wait(Ready)
    for nbytes in (1, 63, 4096, 1 << 20, NBYTES - 9):
        operation = sender.write(peer, source=9, destination=3, nbytes=nbytes)
        completed = sender.wait(Completed, receiver)
        digest = xxhash.xxh3_64_intdigest(content[9 : 9 + nbytes])
        assert Completed(operation, True, digest, "") == completed
        assert content[9 : 9 + nbytes] == receiver.read(3, nbytes)


def test_many_writes_to_each_other_all_complete(sender: Side, receiver: Side) -> None:
    content = sender.fill(2)
    here, there = sender.wait(Ready), receiver.wait(Ready)
    for page in range(256):
        place = page * 16384
        sender.write(there, source=place, destination=NBYTES - 16384 - place, nbytes=16384)
    assert {True} == {c.ok for c in sender.wait_completed(256, receiver).values()}
    assert content[:16384] == receiver.read(NBYTES - 16384, 16384)
    receiver.write(here, source=NBYTES - 16384, destination=16384, nbytes=16384)
    assert receiver.wait(Completed, sender).ok
    assert content[:16384] == sender.read(16384, 16384)


def test_digests_are_of_the_own_arena(sender: Side) -> None:
    content = sender.fill(3)
    sender.transport.submit(DigestRequest(operation=4, offset=100, nbytes=1000))
    digest = xxhash.xxh3_64_intdigest(content[100:1100])
    assert Completed(4, True, digest, "") == sender.wait(Completed)


@pytest.mark.parametrize("destination", [-1, NBYTES, NBYTES - 63])
def test_a_write_outside_the_peers_arena_is_refused_and_lands_nothing(
    sender: Side, receiver: Side, destination: int
) -> None:
    sender.fill(4)
    peer = receiver.wait(Ready)
    sender.write(peer, source=0, destination=destination, nbytes=64)
    completed = sender.wait(Completed, receiver)
    assert (False, 0) == (completed.ok, completed.digest)
    assert bytes(NBYTES) == receiver.read()
    sender.write(peer, source=0, destination=0, nbytes=64)
    assert sender.wait(Completed, receiver).ok


@pytest.mark.parametrize("target", ["", "local:", "local:nobody", "127.0.0.1:15000", "x" * 9999])
def test_an_unknown_session_fails_the_write_and_raises_nothing(sender: Side, target: str) -> None:
    sender.transport.submit(WriteRequest(1, target, 0, 4096, 64, False))
    assert not sender.wait(Completed).ok


def test_after_a_fence_nothing_lands_and_old_addresses_are_refused(
    sender: Side, receiver: Side
) -> None:
    sender.fill(5)
    old = receiver.wait(Ready)
    for _ in range(8):
        sender.write(old, source=0, destination=0, nbytes=NBYTES)
    sender.pump(0.1)
    receiver.pump(0.1)
    receiver.transport.fence()
    os.pwrite(receiver.arena_fd, bytes(NBYTES), 0)
    assert 1 == receiver.wait(Fenced).generation
    new = receiver.wait(Ready)
    assert {False} == {c.ok for c in sender.wait_completed(8, receiver).values()}
    assert abs(new.base_address - old.base_address) >= NBYTES
    mixed = Ready(new.session_name, old.base_address, old.version, 2)
    sender.write(mixed, source=0, destination=0, nbytes=64)
    assert not sender.wait(Completed, receiver).ok
    assert bytes(NBYTES) == receiver.read()


def test_a_fence_loses_what_is_outstanding_and_the_next_session_serves(
    sender: Side, receiver: Side
) -> None:
    sender.fill(6)
    peer = receiver.wait(Ready)
    lost = sender.write(peer, source=0, destination=0, nbytes=64)
    sender.transport.fence()
    assert [Ready, Fenced, Ready] == [type(sender.wait(kind)) for kind in (Ready, Fenced, Ready)]
    kept = sender.write(peer, source=0, destination=0, nbytes=64)
    assert kept == sender.wait(Completed, receiver).operation
    assert lost not in {e.operation for e in sender.seen if isinstance(e, Completed)}


def test_a_closed_peer_fails_what_was_sent_to_it(sender: Side, receiver: Side) -> None:
    peer = receiver.wait(Ready)
    sender.write(peer, source=0, destination=0, nbytes=NBYTES)
    sender.pump(1)
    receiver.transport.close()
    completed = sender.wait(Completed)
    assert not completed.ok
    assert peer.session_name in completed.detail


def test_a_peer_that_serves_nothing_ends_the_session_by_its_deadline(receiver: Side) -> None:
    peer = receiver.wait(Ready)
    with local_side(base_seconds=0.05) as sender:
        sender.transport.start()
        sender.write(peer, source=0, destination=0, nbytes=NBYTES)
        died = sender.wait(Died)
        assert "stalled" in died.detail
        assert (1, 2) == (died.generation, [sender.wait(Ready), sender.wait(Ready)][1].generation)


def test_owners_mistakes_are_refused_by_name(sender: Side) -> None:
    ready = sender.wait(Ready)
    with pytest.raises(TransportError, match="the arena has"):
        sender.write(ready, source=NBYTES - 1, destination=0, nbytes=2)
    sender.transport.submit(WriteRequest(1, ready.session_name, 0, ready.base_address, 8, False))
    with pytest.raises(TransportError, match="already outstanding"):
        sender.transport.submit(DigestRequest(1, 0, 8))
    with pytest.raises(TransportError, match="started before"):
        sender.transport.start()


def test_one_operation_over_the_bound_is_refused() -> None:
    with local_side(operations_max=2) as side:
        side.transport.submit(DigestRequest(1, 0, 8))
        side.transport.submit(DigestRequest(2, 0, 8))
        with pytest.raises(TransportError, match="2 operations are outstanding"):
            side.transport.submit(DigestRequest(3, 0, 8))
        side.transport.start()
        assert {1, 2} == set(side.wait_completed(2))
        side.transport.submit(DigestRequest(3, 0, 8))
        assert side.wait(Completed).ok


def test_garbage_on_the_socket_hurts_nobody(sender: Side, receiver: Side) -> None:
    peer = receiver.wait(Ready)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect("\0" + peer.session_name.removeprefix("local:"))
    stranger.sendall(b"\xff" * 100_000)
    receiver.pump(1)
    receiver.pump(1)
    stranger.close()
    sender.write(peer, source=0, destination=0, nbytes=64)
    assert sender.wait(Completed, receiver).ok
    assert bytes(NBYTES) == receiver.read()


def test_a_closed_transport_leaves_no_descriptor(receiver: Side) -> None:
    peer = receiver.wait(Ready)
    before = open_descriptors()
    with local_side() as side:
        side.transport.start()
        side.write(peer, source=0, destination=0, nbytes=64)
        assert side.wait(Completed, receiver).ok
        side.transport.close()
        receiver.pump(0.1)
    assert before == open_descriptors()
