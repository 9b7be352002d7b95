"""Which counters of which authenticated session were seen, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict

from pdcluster_protocol.errors import Unauthorized


class ReplayWindow:
    """The counters seen of one session, back to `size` behind the newest.

    A ring of bits with a byte to spare (RFC 6479), so a step costs the same however long the window
    is: moving on clears only the bytes that the newest counter enters.
    """

    __slots__ = ("_newest", "_seen", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest = 0
        self._seen = bytearray(-(-size // 8) + 1)

    def accept(self, counter: int) -> None:
        """Remember `counter` (from 1).

        Raises:
            Unauthorized: it was seen before, or lies too far behind the newest to be told.
        """
        age = self._newest - counter
        if age >= self._size:
            raise Unauthorized(f"counter {counter} is {age} behind the newest: too old")
        if age < 0:
            self._move_on(counter)
        place, bit = (counter >> 3) % len(self._seen), 1 << (counter & 7)
        if self._seen[place] & bit:
            raise Unauthorized(f"counter {counter} was used before: a replay")
        self._seen[place] |= bit

    def _move_on(self, counter: int) -> None:
        entered = (counter >> 3) - (self._newest >> 3)
        if entered >= len(self._seen):
            self._seen = bytearray(len(self._seen))
        else:
            for place in range((self._newest >> 3) + 1, (counter >> 3) + 1):
                self._seen[place % len(self._seen)] = 0
        self._newest = counter


class ReplayWindows:
    """One `ReplayWindow` per session; the session that was silent longest goes first."""

    __slots__ = ("_sessions_max", "_size", "_windows")

    def __init__(self, *, size: int, sessions_max: int) -> None:
        self._size = size
        self._sessions_max = sessions_max
        self._windows: OrderedDict[str, ReplayWindow] = OrderedDict()

    def accept(self, session: str, counter: int) -> None:
        """Remember a counter of an authenticated session.

        Raises:
            Unauthorized: a replay, or too old.
        """
        window = self._windows.get(session)
        if window is None:
            window = self._windows[session] = ReplayWindow(self._size)
            if len(self._windows) > self._sessions_max:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(session)
        window.accept(counter)

    def __len__(self) -> int:
        return len(self._windows)
