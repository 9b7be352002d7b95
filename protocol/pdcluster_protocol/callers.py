"""Who is connected to a server, and who makes room for whom.

An open connection costs a descriptor and some memory, whether or not anything is asked on it. Over
the bound a newcomer takes the place of the connection that has been without a request longest, so
many idle ones shut nobody out. Those that are being answered are never closed for others: while
there are only such, the newcomer is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final, Generic, TypeVar

CONNECTIONS_MAX: Final = 4096
CLOSED_KEPT_MAX: Final = 256
"""So many closed connections may be remembered before they are swept."""
BUSY: Final = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
)
"""What a newcomer is told while all others are being answered."""

ConnectionT = TypeVar("ConnectionT")


class Callers(Generic[ConnectionT]):
    """The connections of one server, in the order of their last answer."""

    __slots__ = ("_busy", "_close", "_connections_max", "_idle", "closed", "refused")

    def __init__(
        self, close: Callable[[ConnectionT], bool], *, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        """`close` ends a connection; False: it had ended already."""
        self._close = close
        self._connections_max = connections_max
        self._busy: set[ConnectionT] = set()
        self._idle: OrderedDict[ConnectionT, None] = OrderedDict()
        """Some of them have ended already."""
        self.closed = 0
        """Idle ones that made room."""
        self.refused = 0

    def make_room(self, open_now: Collection[ConnectionT]) -> bool:
        """Whether one more may come, after closing an idle one where it must be."""
        if len(self._idle) > len(open_now) + CLOSED_KEPT_MAX:
            still = set(open_now)
            self._idle = OrderedDict((each, None) for each in self._idle if each in still)
        if len(open_now) < self._connections_max:
            return True
        while self._idle:
            if self._close(self._idle.popitem(last=False)[0]):
                self.closed += 1
                return True
        self.refused += 1
        return False

    def came(self, connection: ConnectionT) -> None:
        """A new connection, on which nothing was asked yet."""
        self._idle[connection] = None

    def asked(self, connection: ConnectionT) -> None:
        """It is being answered."""
        self._idle.pop(connection, None)
        self._busy.add(connection)

    def answered(self, connection: ConnectionT) -> None:
        """It is idle again."""
        self._busy.discard(connection)
        self._idle[connection] = None
        self._idle.move_to_end(connection)
