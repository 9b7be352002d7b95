"""The port between the engine's owner thread and whatever moves the bytes.

One thread owns a transport: it selects on `fileno()`, drains `events()` and calls `submit` and
`fence`. Nothing here blocks, and nothing that a peer does raises.

Two rules carry all the safety:

* An operation that failed, or one that was never answered, proves nothing about the *peer's*
  memory: bytes that were already in kernel buffers land after the error and even after the death
  of the sender. Only the peer's own fence stops them.
* A generation is one life of the transport. `Died` and `Fenced` both mean that the process (or the
  session) of that generation is gone together with its mapping of the arena: from then on no
  write of a peer lands in this arena and nothing reads it, until `Ready` publishes a new session.
  Base addresses of two generations never overlap, so a late write to an old address is refused
  even when the new session happens to draw the old port. (Device memory cannot move; there the
  old port is kept taken instead, see `inprocess`.)
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdcluster_engine.memory.pieces import Pieces

OPERATIONS_MAX = 65536
"""Operations that may be outstanding at one transport; one more is refused."""

PIECES_MAX = 65536
"""Pieces of one operation: at 60,000 a second it ends well within every deadline."""

DETAIL_CHARS_MAX = 600


class WriteRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write bytes of the own arena into a peer's registered memory.

    It is one operation, also when it has many equal pieces: it ends once, it is ok when all pieces
    were applied, and its digest is that of the pieces in their order.
    """

    operation: int
    target: str
    """The peer's session name, as its `Ready` said it."""
    source_offset: int
    """Bytes from the start of the own arena."""
    destination_address: int
    """Absolute address inside the peer's registered memory."""
    nbytes: int
    """Of one piece."""
    digest: bool
    """Answer with the xxh3_64 of the source bytes."""
    pieces: int = 1
    source_stride: int = 0
    """From one piece to the next, at least `nbytes`; of one piece it says nothing."""
    destination_stride: int = 0

    @property
    def source(self) -> Pieces:
        """Where the bytes are, in the own arena."""
        return Pieces(self.source_offset, self.nbytes, self.pieces, self.source_stride)

    @property
    def destination(self) -> Pieces:
        """Where they go, as absolute addresses."""
        return Pieces(self.destination_address, self.nbytes, self.pieces, self.destination_stride)


class DigestRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Hash bytes of the own arena with xxh3_64, outside the engine's process."""

    operation: int
    offset: int
    nbytes: int
    """Of one piece."""
    pieces: int = 1
    stride: int = 0

    @property
    def source(self) -> Pieces:
        """Where the bytes are, in the own arena."""
        return Pieces(self.offset, self.nbytes, self.pieces, self.stride)


class Completed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of one operation.

    With `ok` the last byte has been applied by the peer. Without it the own source is no longer
    read, but what already left may still land (see the module).
    """

    operation: int
    ok: bool
    digest: int
    """xxh3_64, or 0 when it was not asked for."""
    detail: str
    """The named cause when not `ok`."""


def succeeded(operation: int, digest: int = 0) -> Completed:
    """The end of an operation that was applied."""
    return Completed(operation, True, digest, "")  # noqa: FBT003 - the constructor of this meaning


def failed(operation: int, detail: str) -> Completed:
    """The end of an operation that was not, with its cause."""
    cause = detail[:DETAIL_CHARS_MAX]
    return Completed(operation, False, 0, cause)  # noqa: FBT003 - the constructor of this meaning


class Ready(msgspec.Struct, frozen=True):
    """The transport of this generation can be written to and can write."""

    session_name: str
    base_address: int
    """Where peers find byte 0 of the arena."""
    version: str
    generation: int


class Died(msgspec.Struct, frozen=True):
    """The transport ended without being asked; everything outstanding is lost.

    It is a fence: the process was reaped before this was said. Unless `final`, a new generation
    starts by itself. When a `final` one says that the transfer did not end, it is none, and the
    engine's own process has to end.
    """

    detail: str
    generation: int
    final: bool = False
    """The cause will not go away by trying again: a missing library, a wrong configuration."""


class Fenced(msgspec.Struct, frozen=True):
    """An asked fence is complete: no write of that generation lands in the own arena any more."""

    generation: int


TransportEvent = Ready | Completed | Died | Fenced
Request = WriteRequest | DigestRequest


class Deadlines(msgspec.Struct, frozen=True):
    """The transport's own clocks; on expiry it ends itself, it never just reports a failure."""

    base_seconds: float = 15.0
    """Longer than four times Mooncake's 3 s: a hung peer fails a full window of writes first."""
    bytes_per_second_min: float = 4 << 20
    contact_seconds: float = 5.0
    """How long handing one operation to the library may take; a first contact blocks in it."""
    start_seconds: float = 20.0
    """From the start of the process to `Ready`."""

    def stall_seconds(self, nbytes: int) -> float:
        """How long a write may take with `nbytes` (its own included) under way to that peer."""
        return self.base_seconds + nbytes / self.bytes_per_second_min


class Transport(Protocol):
    """What the owner thread holds; all methods are called by one thread."""

    def start(self) -> None:
        """Begin; `Ready` or `Died` arrives as an event. Call it from the owner thread.

        The kernel ties the transfer process to the *thread* that started it.
        """

    def fileno(self) -> int:
        """A descriptor that is readable when `events` has something to do; it never changes."""

    def events(self) -> list[TransportEvent]:
        """Drain without blocking.

        Whatever was outstanding when `Died` or `Fenced` is returned never completes.
        """

    def submit(self, request: Request) -> None:
        """Hand over one operation without blocking.

        Before `Ready` the operation is held and belongs to the generation that becomes ready.

        Raises:
            TransportError: too many outstanding, an operation number in use, bytes outside the own
                arena, an impossible number of pieces, or a transport that has ended for good.
        """

    def fence(self) -> None:
        """End this generation so that nothing of it lands; `Fenced` and a new `Ready` follow."""

    def close(self) -> None:
        """End without a successor and release every descriptor; may be called twice."""
