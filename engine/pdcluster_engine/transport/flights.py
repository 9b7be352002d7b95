"""What the Mooncake adapter holds of its operations: queued, handed over by pieces, in flight."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pdcluster_engine.transport.port import Completed, WriteRequest, failed, succeeded

SMALL_BYTES = 16 << 10
WRITE_BYTES = 256 << 10
"""Where a long piece is cut for TCP: what one write leaves in the sockets then still lies in the
cache when it is read, and a byte costs two thirds of what it does in writes of 512 KiB and more."""
PART_ALIGNMENT_BYTES = 4096
SMALL_SHARE = 4
"""Small writes cost a fixed time each and end between two looks; so many count as one large one."""


class Writing:
    """One operation: how much of it was handed over, and how many of its writes fly.

    A write is one piece, or a part of one that is long.
    """

    __slots__ = ("_part_bytes", "_piece", "_within", "failure", "flying", "request")

    def __init__(self, request: WriteRequest, *, cut: bool) -> None:
        """`cut` allows several writes for one piece."""
        parts = max(1, round(request.nbytes / WRITE_BYTES)) if cut else 1
        self._part_bytes = _aligned(-(-request.nbytes // parts))
        self._piece = 0
        self._within = 0
        self.request = request
        self.flying = 0
        self.failure = ""
        """Why the first write failed; nothing more is handed over then."""

    @property
    def handed_over(self) -> bool:
        """Whether no further write will fly."""
        return bool(self.failure) or self._piece == self.request.pieces

    def next_write(self) -> tuple[int, int, int]:
        """Source offset, destination address and bytes of the write that is handed over now."""
        request, piece, within = self.request, self._piece, self._within
        nbytes = min(self._part_bytes, request.nbytes - within)
        self._within += nbytes
        if self._within == request.nbytes:
            self._within = 0
            self._piece += 1
        source = request.source_offset + piece * request.source_stride + within
        destination = request.destination_address + piece * request.destination_stride + within
        return source, destination, nbytes

    @property
    def end(self) -> Completed:
        """Its end; to be told once it is handed over and nothing of it flies."""
        operation = self.request.operation
        return failed(operation, self.failure) if self.failure else succeeded(operation)


class Flight(NamedTuple):
    """One write inside the library."""

    writing: Writing
    batch: int
    nbytes: int
    started: float
    deadline: float


class Peer:
    """What is queued and under way for one session name."""

    __slots__ = ("failing", "flights", "flying_bytes", "queued", "window")

    def __init__(self, window: int) -> None:
        self.queued: deque[Writing] = deque()
        """Of these some writes may be under way or over already."""
        self.flights: list[Flight] = []
        self.flying_bytes = 0
        self.window = window
        """What may still be handed over, in shares of a large write."""
        self.failing = False
        """The latest write failed. Each takes its time to fail, so no operation flies twice then:
        it waits for the end of its first write before it goes on."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES


def share(nbytes: int) -> int:
    """What one write of so many bytes takes of a window."""
    return 1 if nbytes <= SMALL_BYTES else SMALL_SHARE


def failure(request: WriteRequest, seconds: float) -> str:
    """Why an operation failed of which one write did."""
    return (
        f"Mooncake could not write {_what(request)} to {request.target} (-1 after {seconds:.3f} s)"
    )


def stall(flight: Flight, status: int, now: float) -> str:
    """Why no further answer of the library can be trusted."""
    request = flight.writing.request
    what = "made no end" if status == 0 else f"has the status {status}"
    return (
        f"stalled: the write of {_what(request)} to {request.target} {what} after "
        f"{now - flight.started:.1f} s"
    )


def _what(request: WriteRequest) -> str:
    if request.pieces == 1:
        return f"{request.nbytes} bytes"
    return f"one of {request.pieces} pieces of {request.nbytes} bytes"
