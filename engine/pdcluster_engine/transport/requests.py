"""The operations that a transport has accepted and not yet answered: their bound and checks."""

from __future__ import annotations

from pdcluster_engine.memory.pieces import Pieces
from pdcluster_engine.transport.port import (
    PIECES_MAX,
    Completed,
    Request,
    WriteRequest,
    failed,
)
from pdcluster_protocol.errors import TransportError

TARGET_CHARS_MAX = 256
ADDRESS_END = 1 << 64
PIECE_BYTES_MIN = 4096
"""What a piece counts for at least where time is estimated from bytes: each has a fixed price."""


class Outstanding:
    """A bounded set of operations; what does not fit or leaves the arena is refused by name."""

    __slots__ = ("_arena_nbytes", "_nbytes", "_operations", "_operations_max")

    def __init__(self, arena_nbytes: int, *, operations_max: int) -> None:
        self._arena_nbytes = arena_nbytes
        self._operations_max = operations_max
        self._operations: dict[int, int] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        """How many operations wait for their end."""
        return len(self._operations)

    @property
    def nbytes(self) -> int:
        """Their bytes together, small pieces counted as `PIECE_BYTES_MIN`."""
        return self._nbytes

    def add(self, request: Request) -> None:
        """Accept one operation.

        Raises:
            TransportError: the owner broke a rule; a peer cannot cause it, since the checked fields
                are the owner's own.
        """
        if len(self._operations) >= self._operations_max:
            raise TransportError(
                f"{self._operations_max} operations are outstanding; wait for completions"
            )
        if request.operation in self._operations:
            raise TransportError(f"operation {request.operation} is already outstanding")
        problem = source_problem(request.source, arena_nbytes=self._arena_nbytes)
        if problem:
            raise TransportError(f"operation {request.operation} {problem}")
        nbytes = counted_bytes(request.source)
        self._operations[request.operation] = nbytes
        self._nbytes += nbytes

    def remove(self, operation: int) -> bool:
        """Forget one operation; `False` when it was not outstanding."""
        nbytes = self._operations.pop(operation, None)
        if nbytes is None:
            return False
        self._nbytes -= nbytes
        return True

    def clear(self) -> None:
        """Forget all of them: they are lost with their generation."""
        self._operations.clear()
        self._nbytes = 0


def counted_bytes(pieces: Pieces) -> int:
    """Bytes from which the time of an operation is estimated."""
    return pieces.count * max(pieces.nbytes, PIECE_BYTES_MIN)


def source_problem(source: Pieces, *, arena_nbytes: int) -> str:
    """What is wrong with an operation's place in the own arena, or an empty string."""
    if not 1 <= source.count <= PIECES_MAX:
        return f"has {source.count} pieces; at least 1, at most {PIECES_MAX}"
    if source.count > 1 and source.stride < source.nbytes:
        return f"has pieces of {source.nbytes} bytes every {source.stride} bytes: they overlap"
    if source.nbytes <= 0 or source.offset < 0 or source.end > arena_nbytes:
        return f"covers bytes {source.offset} to {source.end}; the arena has {arena_nbytes}"
    return ""


def refusal(request: Request) -> Completed | None:
    """The answer to a write whose peer-given fields are impossible; such a write is not sent."""
    if not isinstance(request, WriteRequest):
        return None
    place = request.destination
    if place.offset <= 0 or place.end > ADDRESS_END:
        detail = (
            f"destination address {place.offset:#x} with {place.end - place.offset} bytes "
            "is impossible"
        )
    elif place.count > 1 and place.stride < place.nbytes:
        detail = f"pieces of {place.nbytes} bytes every {place.stride} bytes overlap at the peer"
    elif not 0 < len(request.target) <= TARGET_CHARS_MAX:
        detail = f"target {request.target[:40]!r} is not a session name"
    else:
        return None
    return failed(request.operation, detail)
