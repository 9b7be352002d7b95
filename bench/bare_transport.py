"""The engine's transport with nothing else to do: two ends in this process, a window of writes.

Each write is hashed at its source and again where it landed, as a request's runs are.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator

import msgspec

from pdcluster_engine.transport.open import open_transport
from pdcluster_engine.transport.port import Completed, DigestRequest, Ready, Transport, WriteRequest

RUN_BYTES = 64 << 10
WINDOW = 16
PORT_MIN = 17000
PORTS = 32
READY_SECONDS = 20.0
HOSTS = ("127.64.254.1", "127.64.254.2")


class _End(msgspec.Struct, frozen=True):
    transport: Transport
    ready: Ready


def bytes_per_second(nbytes: int) -> float:
    """Move `nbytes` in runs and verify each; a first pass of one run makes the connection."""
    arena_nbytes = -(-nbytes // RUN_BYTES) * RUN_BYTES
    with _end(0, arena_nbytes) as source, _end(1, arena_nbytes) as destination:
        _move(source, destination, 1)
        started = time.monotonic()
        runs = arena_nbytes // RUN_BYTES
        _move(source, destination, runs)
        return runs * RUN_BYTES / (time.monotonic() - started)


@contextlib.contextmanager
def _end(number: int, nbytes: int) -> Iterator[_End]:
    descriptor = os.memfd_create("bench-arena", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    transport = open_transport(
        "mooncake",
        arena_fd=descriptor,
        arena_nbytes=nbytes,
        host=HOSTS[number],
        port_min=PORT_MIN + number * PORTS,
        port_max=PORT_MIN + number * PORTS + PORTS - 1,
        protocol="tcp",
    )
    try:
        transport.start()
        yield _End(transport, _until_ready(transport))
    finally:
        transport.close()
        os.close(descriptor)


def _until_ready(transport: Transport) -> Ready:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        select.select([transport], [], [], 0.1)
        for event in transport.events():
            if isinstance(event, Ready):
                return event
    message = f"the transport is not ready after {READY_SECONDS:g} s"
    raise RuntimeError(message)


def _move(source: _End, destination: _End, runs: int) -> None:
    """Write and verify runs with at most `WINDOW` under way."""
    sent = verified = 0
    while verified < runs:
        while sent < runs and sent - verified < WINDOW:
            source.transport.submit(_write(sent, destination.ready))
            sent += 1
        select.select([source.transport, destination.transport], [], [])
        for event in source.transport.events():
            assert isinstance(event, Completed), event
            assert event.ok, event
            run = event.operation
            destination.transport.submit(DigestRequest(run, run * RUN_BYTES, RUN_BYTES))
        for event in destination.transport.events():
            assert isinstance(event, Completed), event
            verified += 1


def _write(run: int, peer: Ready) -> WriteRequest:
    return WriteRequest(
        operation=run,
        target=peer.session_name,
        source_offset=run * RUN_BYTES,
        destination_address=peer.base_address + run * RUN_BYTES,
        nbytes=RUN_BYTES,
        digest=True,
    )
