"""Live legs: what joins a key in the protocol to a sink at the HTTP side.

Three threads meet here. The HTTP side adds, the model thread emits through a `Leg`, the owner
thread ends it. A `Leg` keeps the sink's promise whatever the order: nothing follows its end, and
there is exactly one.
"""

from __future__ import annotations

import threading

from pdcluster_engine.submission import Output, OutputSink, Submission
from pdcluster_protocol.errors import Overloaded, Reason, RequestFailed
from pdcluster_protocol.ids import Key


class Leg:
    """One submission with its sink, until its one end."""

    __slots__ = ("_ended", "_lock", "_sink", "key", "submission")

    def __init__(self, submission: Submission, sink: OutputSink) -> None:
        self.submission = submission
        self.key = submission.key
        """Where a foreign router minted no attempt, the node's key once it has minted one."""
        self._sink = sink
        self._lock = threading.Lock()
        self._ended = False

    def emit(self, output: Output) -> None:
        """Pass one token on, unless the leg has ended."""
        with self._lock:
            if not self._ended:
                self._sink.emit(output)

    def end(self, reason: Reason | None, detail: str) -> None:
        """Tell the sink the end; a second one is ignored."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if reason is None:
            self._sink.finished()
        else:
            self._sink.failed(reason, detail)


class LegTable:
    """All live legs, at most one for a room and one for a rid."""

    __slots__ = ("_by_rid", "_by_room", "_ended", "_legs_max", "_lock", "draining")

    def __init__(self, *, legs_max: int) -> None:
        self._legs_max = legs_max
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._by_room: dict[int, Leg] = {}
        self._by_rid: dict[str, Leg] = {}
        self.draining = False
        """Nothing new is taken in; what runs may end."""

    def __len__(self) -> int:
        return len(self._by_room)

    def add(self, submission: Submission, sink: OutputSink) -> Leg:
        """Take a leg in.

        Raises:
            Overloaded: the table is full.
            RequestFailed: `RoomInUse`, `RidInUse` or `ShuttingDown`.
        """
        key, rid = submission.key, submission.rid
        leg = Leg(submission, sink)
        if self.draining:
            raise RequestFailed(
                "this engine is shutting down; try another", reason=Reason.SHUTTING_DOWN, key=key
            )
        with self._lock:
            if key.room in self._by_room:
                raise RequestFailed(
                    f"room {key.room} has a live request here; take another room",
                    reason=Reason.ROOM_IN_USE,
                    key=key,
                )
            if rid in self._by_rid:
                raise RequestFailed(
                    f"rid {rid!r} names a live request here; wait for its end or take another",
                    reason=Reason.RID_IN_USE,
                    key=key,
                )
            if len(self._by_room) >= self._legs_max:
                raise Overloaded(
                    f"{self._legs_max} requests are open at this engine; try again later", key=key
                )
            self._by_room[key.room] = leg
            self._by_rid[rid] = leg
        return leg

    def find(self, key: Key) -> Leg | None:
        """The leg of exactly this key; a leg without a router's attempt takes the node's."""
        leg = self._by_room.get(key.room)
        if leg is None or leg.key == key:
            return leg
        if leg.submission.attempt_known or leg.key != leg.submission.key:
            return None
        leg.key = key
        return leg

    def find_submitted(self, key: Key) -> Leg | None:
        """The leg that the HTTP side submitted under this key, whatever its key is now."""
        leg = self._by_room.get(key.room)
        return leg if leg is not None and leg.submission.key == key else None

    def find_rid(self, rid: str) -> Leg | None:
        """The one live leg with exactly this rid."""
        return self._by_rid.get(rid)

    def remove(self, key: Key) -> Leg | None:
        """Forget a leg, so that its room and rid may come again."""
        with self._lock:
            leg = self.find(key)
            if leg is not None:
                del self._by_room[leg.key.room]
                del self._by_rid[leg.submission.rid]
                self._ended.notify_all()
        return leg

    def wait_empty(self, seconds: float) -> None:
        """Wait until no leg is open, at most so long."""
        with self._ended:
            self._ended.wait_for(lambda: not self._by_room, timeout=seconds)

    def keys(self) -> tuple[Key, ...]:
        """The keys of all live legs."""
        with self._lock:
            return tuple(leg.key for leg in self._by_room.values())
