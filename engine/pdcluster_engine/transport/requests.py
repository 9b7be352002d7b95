"""The operations that a transport has accepted and not yet answered: their bound and checks."""

from __future__ import annotations

from pdcluster_engine.transport.port import (
    Completed,
    DigestRequest,
    Request,
    WriteRequest,
    failed,
)
from pdcluster_protocol.errors import TransportError

TARGET_CHARS_MAX = 256
ADDRESS_END = 1 << 64


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
        """Their bytes together."""
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
        offset = source_offset(request)
        end = offset + request.nbytes
        if request.nbytes <= 0 or offset < 0 or end > self._arena_nbytes:
            raise TransportError(
                f"operation {request.operation} covers bytes {offset} to {end}; "
                f"the arena has {self._arena_nbytes}"
            )
        self._operations[request.operation] = request.nbytes
        self._nbytes += request.nbytes

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


def source_offset(request: Request) -> int:
    """Where the operation's bytes begin in the own arena."""
    match request:
        case WriteRequest(source_offset=offset):
            return offset
        case DigestRequest(offset=offset):
            return offset


def refusal(request: Request) -> Completed | None:
    """The answer to a write whose peer-given fields are impossible; such a write is not sent."""
    if not isinstance(request, WriteRequest):
        return None
    address = request.destination_address
    if not 0 < address <= ADDRESS_END - request.nbytes:
        detail = f"destination address {address:#x} with {request.nbytes} bytes is impossible"
    elif not 0 < len(request.target) <= TARGET_CHARS_MAX:
        detail = f"target {request.target[:40]!r} is not a session name"
    else:
        return None
    return failed(request.operation, detail)
