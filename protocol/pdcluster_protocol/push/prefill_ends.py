"""How prefill rooms end: what decode is told, and when our pages go back.

The source pages are free when the model has let go and no write is outstanding. Whether writing has
provably stopped is another question: the ACK says it (`drained`), and decode acts on it. But where
decode may run, a late write must go on to find the request's own bytes in our pages: those wait for
a fence of ours.
"""

from __future__ import annotations

from pdcluster_protocol.effects import ConcludeLeg, StopCompute
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import AbortAck, KVPoll
from pdcluster_protocol.push.farewells import Farewells
from pdcluster_protocol.push.prefill_room import PrefillRoom
from pdcluster_protocol.push.sender import SENDER, SenderState, SenderTrigger


class PrefillEnds:
    """Ends rooms of one prefill node; shares the table of rooms with `PrefillRooms`."""

    __slots__ = ("_ledger", "_rooms", "farewells")

    def __init__(self, ledger: Ledger, rooms: dict[int, PrefillRoom], farewells: Farewells) -> None:
        self._ledger = ledger
        self._rooms = rooms
        self.farewells = farewells

    def fail(self, room: PrefillRoom, reason: Reason, detail: str, *, tell: bool = True) -> None:
        """End a room badly, once; a room that already drains keeps its first cause."""
        ledger = self._ledger
        if room.state is SenderState.DRAINING:
            return
        room.cause = reason
        ledger.queue.remove(room.key)
        ledger.stop_clocks(room.key)
        ledger.emit(ConcludeLeg(room.key, reason, detail))
        ledger.advance(SENDER, room, SenderTrigger.FAULT, f"{reason}: {detail}")
        if tell and room.deliveries and room.wire_key is not None:
            self.farewells.say(room.wire_key, tuple(room.deliveries), reason=reason, detail=detail)
        if room.state is SenderState.FAILED:
            self._acknowledge(room)
            self.close(room, KVPoll.FAILED)
            return
        ledger.set_clock(Clock.ABORT, room.key, ledger.setup.timeouts.abort_seconds)
        if room.computing:
            ledger.emit(StopCompute(room.key))
        self.close_if_drained(room)

    def overdue(self, room: PrefillRoom) -> None:
        """A failed room does not drain: ask the model again, or end the process that writes."""
        ledger = self._ledger
        if room.state is not SenderState.DRAINING:
            return
        ledger.set_clock(Clock.ABORT, room.key, ledger.setup.timeouts.abort_seconds)
        if room.computing:
            ledger.count("compute_overdue")
            ledger.emit(StopCompute(room.key))
        elif not ledger.fencing and ledger.ready:
            ledger.fence("writes of a failed request do not end", len(room.pages))

    def close_if_drained(self, room: PrefillRoom) -> None:
        """Close a draining room when neither the model nor a write touches its pages."""
        if room.state is not SenderState.DRAINING or room.computing:
            return
        if any(delivery.outstanding for delivery in room.deliveries.values()):
            return
        self._ledger.advance(SENDER, room, SenderTrigger.DRAINED)
        self._acknowledge(room)
        self.close(room, KVPoll.FAILED)

    def _acknowledge(self, room: PrefillRoom) -> None:
        drained = all(delivery.drained for delivery in room.deliveries.values())
        assert room.wire_key is not None or not room.ack_targets
        for lane, generation in room.ack_targets.items():
            if generation is not None and room.wire_key is not None:
                ack = AbortAck(room.wire_key, lane.rank, generation, drained)
                self._ledger.send(lane, ack)

    def close(self, room: PrefillRoom, status: KVPoll) -> None:
        """Forget a room in a terminal state; remember how it ended."""
        ledger = self._ledger
        drained = all(delivery.drained for delivery in room.deliveries.values())
        del self._rooms[room.key.room]
        ledger.stop_clocks(room.key)
        if room.read_by_strays:
            ledger.pool.quarantine(room.key, ledger.now, needs_fence=True)
            ledger.slots.quarantine(room.key, ledger.now, needs_fence=True)
        else:
            ledger.pool.release(room.key)
            ledger.slots.release(room.key)
        ledger.bury(room.wire_key or room.key, status, reason=room.cause, drained=drained)
