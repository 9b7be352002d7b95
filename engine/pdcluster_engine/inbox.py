"""Events on their way into the owner thread, and the wake-up that goes with them.

Any thread may post. Posting wakes the selector once per batch: whoever finds the box empty writes
to the eventfd, all others only append. The model thread waits when the box is over its bound (it
can: nobody waits for it), the HTTP side never does: its events are bounded by the live legs.
"""

from __future__ import annotations

import contextlib
import os
import threading

from pdcluster_protocol.errors import LocalProtocolError
from pdcluster_protocol.events import Event

INBOX_MAX = 65536
_ROOM_SECONDS_MAX = 60.0


class Inbox:
    """A bounded mailbox whose descriptor is readable while something lies in it."""

    __slots__ = ("_closed", "_events", "_events_max", "_fd", "_lock", "_room")

    def __init__(self, *, events_max: int = INBOX_MAX) -> None:
        self._events_max = events_max
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    def fileno(self) -> int:
        """Readable when `drain` has something, or after `wake`."""
        return self._fd

    def __len__(self) -> int:
        return len(self._events)

    def post(self, event: Event) -> None:
        """Add an event without waiting; after `close` it goes nowhere."""
        with self._lock:
            self._add(event)

    def post_when_room(self, event: Event) -> None:
        """Add an event, waiting while the box is full.

        Raises:
            LocalProtocolError: the owner has taken nothing for a minute; the engine is stuck.
        """
        with self._room:
            if not self._room.wait_for(self._has_room, timeout=_ROOM_SECONDS_MAX):
                raise LocalProtocolError(
                    f"the owner thread took none of {len(self._events)} events"
                    f" for {_ROOM_SECONDS_MAX} s"
                )
            self._add(event)

    def wake(self) -> None:
        """Let the owner's loop turn without an event."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Event]:
        """All events so far, in order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        with self._room:
            events, self._events = self._events, []
            self._room.notify_all()
        return events

    def close(self) -> None:
        """Release the descriptor and whoever waits."""
        with self._room:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
            self._room.notify_all()

    def _has_room(self) -> bool:
        return self._closed or len(self._events) < self._events_max

    def _add(self, event: Event) -> None:
        if self._closed:
            return
        self._events.append(event)
        if len(self._events) == 1:
            os.eventfd_write(self._fd, 1)
