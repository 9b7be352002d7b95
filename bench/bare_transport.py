"""The engine's transport with nothing else to do: two ends in this process, a window of writes.

Each end has a transfer process of its own, and this process drives both as an engine's owner thread
does. With digests each write is hashed at its source and again where it landed, as a request's runs
are.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from bench.kv_geometry import Move
from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import (
    Completed,
    DigestRequest,
    Ready,
    TransportEvent,
    WriteRequest,
)
from pdcluster_engine.transport.supervised import SupervisedTransport

RUN_BYTES = 64 << 10
WINDOW = 16
PORT_MIN = 17000
PORTS = 32
READY_SECONDS = 20.0
STALL_SECONDS = 60.0
HOSTS = ("127.64.254.1", "127.64.254.2")


class End(msgspec.Struct, frozen=True):
    """One side: its transport, and what peers know of it."""

    transport: SupervisedTransport
    ready: Ready

    @property
    def pid(self) -> int:
        """Of its transfer process."""
        assert self.transport.pid is not None
        return self.transport.pid


def bytes_per_second(nbytes: int) -> float:
    """Move `nbytes` in runs and verify each; a first pass of one run makes the connection."""
    count = -(-nbytes // RUN_BYTES)
    moves = [Move(run * RUN_BYTES, run * RUN_BYTES, RUN_BYTES) for run in range(count)]
    with (
        memory(count * RUN_BYTES) as here,
        memory(count * RUN_BYTES) as there,
        end(0, here, count * RUN_BYTES) as source,
        end(1, there, count * RUN_BYTES) as destination,
    ):
        move(source, destination, moves[:1], digests=True)
        return count * RUN_BYTES / move(source, destination, moves, digests=True)


@contextlib.contextmanager
def memory(nbytes: int) -> Iterator[int]:
    """A memfd of zeros."""
    descriptor = os.memfd_create("bench-arena", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def end(number: int, descriptor: int, nbytes: int) -> Iterator[End]:
    """A transport over a memfd, ready."""
    port_min = PORT_MIN + number * PORTS
    settings = Settings(host=HOSTS[number], port_min=port_min, port_max=port_min + PORTS - 1)
    transport = SupervisedTransport(settings, arena_fd=descriptor, arena_nbytes=nbytes)
    try:
        transport.start()
        yield End(transport, _until_ready(transport))
    finally:
        transport.close()


def move(source: End, destination: End, moves: Sequence[Move], *, digests: bool) -> float:
    """Write all moves with at most `WINDOW` under way, and verify them if asked; the seconds."""
    queue = deque(enumerate(moves))
    digest_of: dict[int, int] = {}
    writing = checked = 0
    started = time.perf_counter()
    while checked < len(moves):
        while queue and writing < WINDOW:
            source.transport.submit(_write(*queue.popleft(), destination.ready, digest=digests))
            writing += 1
        _wait(source, destination)
        for event in source.transport.events():
            run = _ended(event)
            writing -= 1
            if digests:
                digest_of[run.operation] = run.digest
                destination.transport.submit(_verify(run.operation, moves[run.operation]))
            else:
                checked += 1
        for event in destination.transport.events():
            run = _ended(event)
            assert digest_of.pop(run.operation) == run.digest, run
            checked += 1
    return time.perf_counter() - started


def _wait(source: End, destination: End) -> None:
    readable = select.select([source.transport, destination.transport], [], [], STALL_SECONDS)[0]
    if not readable:
        message = f"nothing moved within {STALL_SECONDS:g} s"
        raise RuntimeError(message)


def _ended(event: TransportEvent) -> Completed:
    assert isinstance(event, Completed), event
    assert event.ok, event
    return event


def _until_ready(transport: SupervisedTransport) -> Ready:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        select.select([transport], [], [], 0.1)
        for event in transport.events():
            if isinstance(event, Ready):
                return event
    message = f"the transport is not ready after {READY_SECONDS:g} s"
    raise RuntimeError(message)


def _write(operation: int, move: Move, peer: Ready, *, digest: bool) -> WriteRequest:
    return WriteRequest(
        operation=operation,
        target=peer.session_name,
        source_offset=move.source,
        destination_address=peer.base_address + move.destination,
        nbytes=move.nbytes,
        digest=digest,
        pieces=move.pieces,
        source_stride=move.source_stride,
        destination_stride=move.destination_stride,
    )


def _verify(operation: int, move: Move) -> DigestRequest:
    return DigestRequest(
        operation, move.destination, move.nbytes, move.pieces, move.destination_stride
    )
