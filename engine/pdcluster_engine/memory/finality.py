"""What the model thread says about memory becomes true only when the device has got there.

A forward on an asynchronous device returns while its kernels still wait in a stream. "These rows
are final", "this prompt is computed" and "I have let go of these pages" are then statements about
the future, and each would do harm if it were believed too early: a transfer would send old bytes,
or the pages would go to a peer that writes into them at once, which no stream orders.

So on such a device every event takes a mark in the stream with it and is passed on behind it, in
order, by one thread that only looks at marks. The owner thread never waits, and the node hears only
what is true. On the CPU an event is true when it is posted, and none of this exists.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pdcluster_protocol.errors import LocalProtocolError, PDClusterError, Reason
from pdcluster_protocol.events import Event

EVENTS_MAX = 65536
PAUSE_SECONDS_MIN = 50e-6
PAUSE_SECONDS_MAX = 1e-3
MARK_SECONDS = 300.0
"""A forward that takes longer has hung the device; nothing but a new process helps."""
_ROOM_SECONDS_MAX = 60.0
_IDLE_SECONDS_MAX = 60.0


class Mark(Protocol):
    """A point in the device's stream, such as a CUDA event."""

    def query(self) -> bool:
        """Whether everything before it is done; raises what the device has failed with."""


Record = Callable[[], Mark]
"""Put a mark behind everything that the calling thread has asked of the device so far."""


class FinalityGate:
    """Takes events on the model thread and passes each on once it is true."""

    __slots__ = (
        "_changed",
        "_ended",
        "_events_max",
        "_forward",
        "_mark_seconds",
        "_queue",
        "_record",
    )

    def __init__(
        self,
        record: Record,
        forward: Callable[[Event], None],
        *,
        events_max: int = EVENTS_MAX,
        mark_seconds: float = MARK_SECONDS,
    ) -> None:
        self._record = record
        self._forward = forward
        self._events_max = events_max
        self._mark_seconds = mark_seconds
        self._queue: deque[tuple[Mark, Event]] = deque()
        self._changed = threading.Condition()
        self._ended = False

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, event: Event) -> None:
        """Pass `event` on when the device has done all that this thread asked of it before.

        Raises:
            LocalProtocolError: the gate has been full for a minute.
            RuntimeError: the device has failed.
        """
        mark = self._record()
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout=_ROOM_SECONDS_MAX):
                raise LocalProtocolError(
                    f"the device reached none of {len(self._queue)} marks for {_ROOM_SECONDS_MAX} s"
                )
            self._queue.append((mark, event))
            self._changed.notify_all()

    def run(self) -> None:
        """The thread's body, until `shut_down`.

        Raises:
            PDClusterError: the device does not reach a mark.
            RuntimeError: the device has failed.
        """
        while (waiting := self._next()) is not None:
            mark, event = waiting
            self._wait(mark)
            if self._ended:
                return
            self._forward(event)
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def shut_down(self) -> None:
        """End; what is not true yet is never said."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _next(self) -> tuple[Mark, Event] | None:
        """The first of the queue once there is one; None after `shut_down`."""
        with self._changed:
            while not self._queue and not self._ended:
                self._changed.wait(_IDLE_SECONDS_MAX)
            return None if self._ended else self._queue[0]

    def _wait(self, mark: Mark) -> None:
        pause = PAUSE_SECONDS_MIN
        deadline = time.monotonic() + self._mark_seconds
        while not mark.query() and not self._ended:
            if time.monotonic() > deadline:
                raise PDClusterError(
                    f"the device has not reached a mark for {self._mark_seconds} s",
                    reason=Reason.MODEL_FAILED,
                )
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _has_room(self) -> bool:
        return self._ended or len(self._queue) < self._events_max
