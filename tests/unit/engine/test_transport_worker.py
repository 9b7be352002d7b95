"""The loop of a transfer process: what it hashes when, and what it tells."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.transport.channel import Channel, ChannelClosed
from pdcluster_engine.transport.port import (
    Completed,
    DigestRequest,
    Request,
    WriteRequest,
    failed,
    succeeded,
)
from pdcluster_engine.transport.process import Worker

CONTENT = bytes(range(256)) * 64
WAIT_SECONDS = 10.0


class ScriptedAdapter:
    """Ends every write at the next look, those to `nobody` without success."""

    def __init__(self, *, looks: int) -> None:
        self._looks = looks
        """After so many looks a write ends."""
        self._waiting: list[tuple[WriteRequest, int]] = []
        self.hurry = False
        self.busy = False

    @property
    def outstanding(self) -> int:
        return len(self._waiting)

    def submit(self, request: WriteRequest) -> None:
        self._waiting.append((request, self._looks))

    def poll(self) -> list[Completed]:
        over = [request for request, looks in self._waiting if looks <= 1]
        self._waiting = [(request, looks - 1) for request, looks in self._waiting if looks > 1]
        return [
            failed(one.operation, "nobody there")
            if one.target == "nobody"
            else succeeded(one.operation)
            for one in over
        ]


class NotedWindow(HostWindow):
    """Remembers where it was asked to hash."""

    def __init__(self) -> None:
        super().__init__(memoryview(CONTENT))
        self.hashed: list[int] = []

    def digest(self, offset: int, nbytes: int, *, pieces: int = 1, stride: int = 0) -> int:
        self.hashed.append(offset)
        return super().digest(offset, nbytes, pieces=pieces, stride=stride)


@contextmanager
def working(adapter: ScriptedAdapter, window: NotedWindow) -> Iterator[Channel[Completed]]:
    ours, theirs = socket.socketpair()
    engine: Channel[Completed] = Channel(ours, Completed)
    worker = Worker(Channel[Request](theirs, Request), adapter, window)

    def serve() -> None:
        try:
            worker.serve()
        except ChannelClosed:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield engine
    finally:
        engine.shut_down()
        thread.join(WAIT_SECONDS)
        engine.close()
        assert not thread.is_alive()


def answers(engine: Channel[Completed], count: int) -> dict[int, Completed]:
    got: list[Completed] = []
    while len(got) < count:
        assert select.select([engine], [], [], WAIT_SECONDS)[0]
        got += engine.receive()
    assert count == len(got)
    return {completed.operation: completed for completed in got}


def write(operation: int, target: str = "peer", *, digest: bool = True) -> WriteRequest:
    return WriteRequest(operation, target, operation * 8, 1 << 40, 64, digest)


def digest(operation: int) -> int:
    return xxhash.xxh3_64_intdigest(CONTENT[operation * 8 : operation * 8 + 64])


def test_a_write_is_told_with_its_digest_whether_it_landed_before_or_after_the_hash() -> None:
    for looks in (1, 3):
        window = NotedWindow()
        with working(ScriptedAdapter(looks=looks), window) as engine:
            engine.send([write(1), write(2, digest=False), DigestRequest(3, 24, 64)])
            told = answers(engine, 3)
        assert succeeded(1, digest(1)) == told[1]
        assert succeeded(2) == told[2]
        assert succeeded(3, digest(3)) == told[3]
        assert [8, 24] == window.hashed


def test_a_failed_write_is_told_at_once_and_its_source_is_not_hashed_any_more() -> None:
    window = NotedWindow()
    with working(ScriptedAdapter(looks=1), window) as engine:
        engine.send([write(1, "nobody")])
        assert {1: failed(1, "nobody there")} == answers(engine, 1)
        # The same number again is another operation.
        engine.send([write(1)])
        assert {1: succeeded(1, digest(1))} == answers(engine, 1)
    assert [8] == window.hashed


def test_a_failure_after_the_hash_has_no_digest() -> None:
    window = NotedWindow()
    with working(ScriptedAdapter(looks=5), window) as engine:
        engine.send([write(1, "nobody")])
        assert {1: failed(1, "nobody there")} == answers(engine, 1)
    assert [8] == window.hashed
