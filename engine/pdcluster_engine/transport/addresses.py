"""Where the arena lies for peers: another place in each generation."""

from __future__ import annotations

import secrets

ADDRESS_MIN = 0x1000_0000_0000
ADDRESS_MAX = 0x5000_0000_0000
"""A part of the address space that neither the loader nor the heap uses: 64 TiB."""
ADDRESS_STEP = 1 << 30


class AddressPlan:
    """Base addresses for the generations of one arena; no two of them overlap.

    A peer's write names an absolute address. As a later generation never has the arena where an
    earlier one had it, such a write is refused as unregistered, whatever port it reaches. The
    random start does the same between engines of one machine.
    """

    __slots__ = ("_next", "_stride")

    def __init__(self, arena_nbytes: int) -> None:
        self._stride = (arena_nbytes // ADDRESS_STEP + 2) * ADDRESS_STEP
        span = max(1, (ADDRESS_MAX - ADDRESS_MIN) // 2 // ADDRESS_STEP)
        self._next = ADDRESS_MIN + secrets.randbelow(span) * ADDRESS_STEP

    def take(self) -> int:
        """The base address of the next generation."""
        if self._next + self._stride > ADDRESS_MAX:
            self._next = ADDRESS_MIN
        address = self._next
        self._next += self._stride
        return address
