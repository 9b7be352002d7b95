"""Equal pieces of memory at equal distances: a row's heads, token by token.

A contiguous range is one piece. The bytes of many are counted, sent and hashed in the order of the
pieces, as if they lay side by side.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Pieces(msgspec.Struct, frozen=True):
    """Where the pieces lie, as offsets from the start of a memory."""

    offset: int
    nbytes: int
    """Of one piece."""
    count: int = 1
    stride: int = 0
    """From the start of one piece to that of the next; of one piece it says nothing."""

    @property
    def total_nbytes(self) -> int:
        """Of all pieces together."""
        return self.nbytes * self.count

    @property
    def end(self) -> int:
        """The first offset behind the last piece."""
        return self.offset + (self.count - 1) * self.stride + self.nbytes

    def place(self, position: int) -> int:
        """The offset of the byte that has this position among all bytes of the pieces."""
        piece, within = divmod(position, self.nbytes)
        return self.offset + piece * self.stride + within

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Start and end of each piece; side by side they are one range."""
        if self.count == 1 or self.stride == self.nbytes:
            yield self.offset, self.end
            return
        for piece in range(self.count):
            start = self.offset + piece * self.stride
            yield start, start + self.nbytes

    def views(
        self, memory: memoryview, position: int, *, nbytes_max: int, count_max: int
    ) -> list[memoryview]:
        """The bytes from `position` on as slices of `memory`, as far as both bounds allow."""
        views: list[memoryview] = []
        left = min(self.total_nbytes - position, nbytes_max)
        while left > 0 and len(views) < count_max:
            start = self.place(position)
            size = min(self.nbytes - position % self.nbytes, left)
            views.append(memory[start : start + size])
            position += size
            left -= size
        return views
