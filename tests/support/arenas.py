"""Two arenas and the transports over them, for tests of the transfer layer."""

from __future__ import annotations

import itertools
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import xxhash

from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import (
    Completed,
    Deadlines,
    Ready,
    Transport,
    TransportEvent,
    WriteRequest,
)
from pdcluster_engine.transport.supervised import SupervisedTransport

WAIT_SECONDS = 30.0
PORTS = 24

EventT = TypeVar("EventT")

_port_ranges = itertools.cycle(range(16200, 16970, PORTS))


class Side:
    """One engine's part: a memfd, a transport over it, and every event that came."""

    def __init__(self, transport: Transport, arena_fd: int, nbytes: int) -> None:
        self.transport = transport
        self.arena_fd = arena_fd
        self.nbytes = nbytes
        self.seen: list[TransportEvent] = []
        self._unread: list[TransportEvent] = []
        self._operations = itertools.count(1)

    def pump(self, seconds: float) -> None:
        """Take what comes within `seconds`; returns with the first."""
        select.select([self.transport], [], [], max(0.0, seconds))
        events = self.transport.events()
        self.seen += events
        self._unread += events

    def wait(self, kind: type[EventT], *others: Side) -> EventT:
        """The next event of one kind, while the others' transports are served too."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            for position, event in enumerate(self._unread):
                if isinstance(event, kind):
                    del self._unread[position]
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} within {WAIT_SECONDS} s; saw {self.seen[-5:]}"
            if others:
                select.select([s.transport for s in (self, *others)], [], [], left)
                for other in others:
                    other.pump(0)
            self.pump(0 if others else left)

    def wait_completed(self, count: int, *others: Side) -> dict[int, Completed]:
        """The next `count` completions by operation."""
        found = [self.wait(Completed, *others) for _ in range(count)]
        return {completed.operation: completed for completed in found}

    def wait_completed_of(self, operation: int) -> Completed:
        """The completion of one operation; earlier ones of others are passed over."""
        while (completed := self.wait(Completed)).operation != operation:
            pass
        return completed

    def write(
        self, peer: Ready, *, source: int, destination: int, nbytes: int, digest: bool = True
    ) -> int:
        """Submit one write to an offset of the peer's arena; the operation's number."""
        operation = next(self._operations)
        self.transport.submit(
            WriteRequest(
                operation=operation,
                target=peer.session_name,
                source_offset=source,
                destination_address=peer.base_address + destination,
                nbytes=nbytes,
                digest=digest,
            )
        )
        return operation

    def fill(self, seed: int) -> bytes:
        """Give the whole arena random content."""
        content = random.Random(seed).randbytes(self.nbytes)
        os.pwrite(self.arena_fd, content, 0)
        return content

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of the arena as the owner sees them."""
        return os.pread(self.arena_fd, self.nbytes if nbytes is None else nbytes, offset)

    def digest(self) -> int:
        """Digest of the whole arena."""
        return xxhash.xxh3_64_intdigest(self.read())

    @property
    def pid(self) -> int:
        """The transfer process of a supervised transport."""
        assert isinstance(self.transport, SupervisedTransport)
        assert self.transport.pid is not None
        return self.transport.pid


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def memfd(nbytes: int) -> Iterator[int]:
    """An arena of zeros."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def mooncake_side(
    host: str, *, nbytes: int = 16 << 20, deadlines: Deadlines | None = None
) -> Iterator[Side]:
    """A real transfer process with ports of its own."""
    low = next(_port_ranges)
    settings = Settings(
        host=host,
        port_min=low,
        port_max=low + PORTS - 1,
        deadlines=Deadlines() if deadlines is None else deadlines,
    )
    with memfd(nbytes) as fd:
        transport = SupervisedTransport(settings, arena_fd=fd, arena_nbytes=nbytes)
        try:
            transport.start()
            yield Side(transport, fd, nbytes)
        finally:
            transport.close()


@contextmanager
def engine_process(hosts: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process that has a transport at each host, and the pids of their transfer processes."""
    program = (
        "import contextlib, sys\n"
        "from support.arenas import mooncake_side\n"
        "from pdcluster_engine.transport.port import Ready\n"
        "with contextlib.ExitStack() as stack:\n"
        f"    sides = [stack.enter_context(mooncake_side(host)) for host in {[*hosts]!r}]\n"
        "    for side in sides:\n"
        "        side.wait(Ready)\n"
        "    print(*(side.pid for side in sides), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as engine:
        assert engine.stdout is not None
        yield engine, [int(pid) for pid in engine.stdout.readline().split()]
