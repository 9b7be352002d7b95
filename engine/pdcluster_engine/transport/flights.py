"""What the Mooncake adapter holds of its operations: queued, handed over by pieces, in flight."""

from __future__ import annotations

from collections import deque

from pdcluster_engine.transport.port import Completed, WriteRequest, failed, succeeded

SMALL_BYTES = 16 << 10
SMALL_SHARE = 4
"""Small writes cost a fixed time each and end between two looks; so many count as one large one."""


class Writing:
    """One operation: how many of its pieces were handed over, and how many of those fly."""

    __slots__ = ("failure", "flying", "handed", "request")

    def __init__(self, request: WriteRequest) -> None:
        self.request = request
        self.handed = 0
        self.flying = 0
        self.failure = ""
        """Why the first piece failed; nothing more is handed over then."""

    @property
    def handed_over(self) -> bool:
        """Whether no further piece will fly."""
        return bool(self.failure) or self.handed == self.request.pieces

    @property
    def end(self) -> Completed:
        """Its end; to be told once it is handed over and nothing of it flies."""
        operation = self.request.operation
        return failed(operation, self.failure) if self.failure else succeeded(operation)


class Flight:
    """One piece of an operation inside the library."""

    __slots__ = ("batch", "deadline", "started", "writing")

    def __init__(self, writing: Writing, batch: int, started: float, deadline: float) -> None:
        self.writing = writing
        self.batch = batch
        self.started = started
        self.deadline = deadline


class Peer:
    """What is queued and under way for one session name."""

    __slots__ = ("flights", "flying_bytes", "queued", "window")

    def __init__(self, window: int) -> None:
        self.queued: deque[Writing] = deque()
        """Only the first may be partly handed over."""
        self.flights: list[Flight] = []
        self.flying_bytes = 0
        self.window = window
        """What may still be handed over, in shares of a large write."""


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
