"""Which transport sessions of peers our ranks have written to, and which of those are gone.

Mooncake keeps the connections to a peer's data port when the peer has closed them, until the same
port answers again (seen: four for each port, half closed). Nothing but a new transfer process drops
them, so a node that has written to some sessions that are gone fences itself when that delays
nobody (`fencing`).
"""

from __future__ import annotations

from collections.abc import Collection


class Contacts:
    """The sessions that the present transports of one node know."""

    __slots__ = ("_gone", "_written")

    def __init__(self, rank_count: int) -> None:
        self._written: tuple[set[str], ...] = tuple(set() for _ in range(rank_count))
        self._gone = [0] * rank_count

    @property
    def gone(self) -> int:
        """Sessions that are gone and that one transport has written to: the most of any rank."""
        return max(self._gone)

    def wrote(self, rank: int, session: str) -> None:
        """A rank's transport is told to write there."""
        self._written[rank].add(session)

    def remain(self, sessions: Collection[str]) -> None:
        """Of all sessions only these are left."""
        self._gone = [sum(each not in sessions for each in known) for known in self._written]

    def forget_rank(self, rank: int) -> None:
        """Its transport has ended, and its connections with it."""
        self._written[rank].clear()
        self._gone[rank] = 0
