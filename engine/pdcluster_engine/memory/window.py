"""The bytes of an arena as the host sees them, wherever the arena lies.

Metadata rows are packed by the host and digests are computed by it. On the CPU both look straight
into the mapping; on a device both go through copies. Whoever needs one or the other sees this port.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import xxhash

from pdcluster_engine.memory.pieces import Pieces


class ByteWindow(Protocol):
    """Offsets count from the start of the arena; each call is complete when it returns."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""

    def read(self, offset: int, nbytes: int) -> bytes | memoryview:
        """What lies there now."""

    def write(self, offset: int, content: bytes) -> None:
        """Put `content` there, visible to whoever reads the arena next."""

    def digest(self, offset: int, nbytes: int, *, pieces: int = 1, stride: int = 0) -> int:
        """xxh3_64 of what lies there: of so many pieces in turn, each of `nbytes`."""


class ArenaMemory(msgspec.Struct, frozen=True):
    """What a transport inside this process must know of an arena, which outlives the transport."""

    address: int
    """Of byte 0, in host or device memory; peers write to it."""
    nbytes: int
    window: ByteWindow
    """For the transport alone: its copies must not wait for anybody else's."""
    on_device: bool = False


class HostWindow:
    """A window that is the memory itself."""

    __slots__ = ("_view",)

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def nbytes(self) -> int:
        """See `ByteWindow`."""
        return len(self._view)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """See `ByteWindow`; what is returned shows later changes."""
        require_inside(self.nbytes, offset, nbytes)
        return self._view[offset : offset + nbytes]

    def write(self, offset: int, content: bytes) -> None:
        """See `ByteWindow`."""
        require_inside(self.nbytes, offset, len(content))
        self._view[offset : offset + len(content)] = content

    def digest(self, offset: int, nbytes: int, *, pieces: int = 1, stride: int = 0) -> int:
        """See `ByteWindow`."""
        if pieces == 1:
            return xxhash.xxh3_64_intdigest(self.read(offset, nbytes))
        places = Pieces(offset, nbytes, pieces, stride)
        require_pieces_inside(self.nbytes, places)
        hashed = xxhash.xxh3_64()
        for start, end in places.ranges():
            hashed.update(self._view[start:end])
        return hashed.intdigest()


def require_inside(window_nbytes: int, offset: int, nbytes: int) -> None:
    """Raise for a range that leaves the window: a fault of the caller."""
    if offset < 0 or nbytes < 0 or offset + nbytes > window_nbytes:
        message = f"bytes {offset} to {offset + nbytes}; the window has {window_nbytes} bytes"
        raise ValueError(message)


def require_pieces_inside(window_nbytes: int, pieces: Pieces) -> None:
    """Raise for pieces of which one leaves the window, or that are none."""
    if pieces.count < 1 or pieces.stride < 0:
        message = f"{pieces.count} pieces at a stride of {pieces.stride}; at least 1 and 0"
        raise ValueError(message)
    require_inside(window_nbytes, pieces.offset, pieces.end - pieces.offset)
