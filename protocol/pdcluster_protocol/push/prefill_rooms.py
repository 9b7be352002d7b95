"""All prefill rooms of one node: events in, effects through the ledger.

A leg and decode's metadata meet (`meeting`). Then: pages of our own, compute, write behind the
model, metadata rows last, status, decode's conclusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdcluster_protocol.admission import Grant
from pdcluster_protocol.effects import ConcludeLeg, CountBytes, StartPrefill
from pdcluster_protocol.errors import Reason, parse_reason
from pdcluster_protocol.events import (
    ComputeStopped,
    Event,
    LegArrived,
    OperationDone,
    PromptComputed,
    RowsWritten,
)
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import (
    Abort,
    AbortAck,
    Concluded,
    KVPoll,
    NodeMessage,
    RegisterKVArgs,
    TransferMetadata,
)
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.farewells import Farewells
from pdcluster_protocol.push.meeting import Meeting
from pdcluster_protocol.push.pairing import Arrived, Pairing
from pdcluster_protocol.push.prefill_ends import PrefillEnds
from pdcluster_protocol.push.prefill_room import ACTIVE, PrefillRoom
from pdcluster_protocol.push.runs import RunPlanner
from pdcluster_protocol.push.sender import SENDER, SenderState, SenderTrigger
from pdcluster_protocol.push.writing import Writing
from pdcluster_protocol.ranks import Lane
from pdcluster_protocol.segments import sent_pages

TIMEOUTS: Final[dict[Clock, tuple[Reason, str]]] = {
    Clock.BOOTSTRAP: (Reason.BOOTSTRAP_TIMEOUT, "decode sent no page numbers in time"),
    Clock.STALL: (Reason.STALLED, "no chunk and no byte made progress"),
    Clock.TOTAL: (Reason.DEADLINE_EXCEEDED, "the request's budget ran out"),
}


class PrefillRooms:
    """The table of prefill rooms; a prefill `nodes.Node` routes events here."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.rooms: dict[int, PrefillRoom] = {}
        self.pairing = Pairing(ledger)
        self.farewells = Farewells(ledger)
        self.writing = Writing(ledger)
        self._ends = PrefillEnds(ledger, self.rooms, self.farewells)
        self._meeting = Meeting(ledger, self.rooms, self.pairing, self._ends, self._retargeted)

    # --- what the node sees ---

    def views(self) -> Sequence[PrefillRoom]:
        """Open rooms."""
        return tuple(self.rooms.values())

    def live_key(self, room: int) -> Key | None:
        """The key of the open room with this number."""
        found = self.rooms.get(room)
        return None if found is None else found.key

    def writable_count(self) -> int:
        """Nobody writes into prefill's pages; what a fence delays are our own writes."""
        return sum(room.state in ACTIVE for room in self.rooms.values())

    def waiting_count(self) -> int:
        """Early metadata and farewells."""
        return self.pairing.early_count + len(self.farewells)

    def message(self, message: NodeMessage, incarnation: str, rank: int) -> None:
        """A decode rank's message to one of our ranks."""
        match message:
            case RegisterKVArgs():
                self.pairing.register(message, incarnation)
            case TransferMetadata():
                lane = Lane(rank, message.reply_to)
                self._meeting.metadata_arrived(Arrived(lane, message, incarnation))
            case Abort():
                self.abort_arrived(message, Lane(rank, message.reply_to))
            case Concluded():
                self.concluded(message)
            case _:
                self._ledger.count("message_for_the_other_role")

    def local(self, event: Event) -> None:
        """What model and transport answered."""
        match event:
            case RowsWritten():
                self.rows_written(event)
            case PromptComputed():
                self.prompt_computed(event.key)
            case ComputeStopped():
                self.compute_stopped(event.key, event.reason, event.detail)
            case OperationDone():
                self.operation_done(event)
            case _:
                self._ledger.count("event_for_the_other_role")

    # --- legs ---

    def leg_arrived(self, leg: LegArrived) -> None:
        """A leg whose room, size and attempt were checked by the node."""
        ledger = self._ledger
        timeouts = ledger.setup.timeouts
        room = PrefillRoom(leg, ledger.setup.limits.retransmit_seconds_min)
        self.rooms[leg.key.room] = room
        ledger.set_clock(Clock.BOOTSTRAP, room.key, timeouts.bootstrap_seconds)
        budget = leg.budget_seconds or timeouts.bootstrap_seconds + timeouts.transfer_seconds
        ledger.set_clock(Clock.TOTAL, room.key, budget)
        self._meeting.leg_arrived(room)

    def cancel(self, key: Key, reason: Reason, detail: str) -> bool:
        """The leg's HTTP side gave up; decode's metadata comes again and hears of it."""
        room = self._room(key)
        if room is None:
            self.pairing.forget(key)
            return False
        self._ends.fail(room, reason, detail)
        return True

    def abandon(self, key: Key) -> Key:
        """Forget a room in whatever state; what its writes bring means nothing any more."""
        room = self._room(key)
        if room is None:
            return key
        del self.rooms[key.room]
        return room.wire_key or key

    # --- decode's messages ---

    def abort_arrived(self, abort: Abort, lane: Lane) -> None:
        """Decode gave up: stop, and say when nothing is written any more."""
        ledger, key = self._ledger, abort.key
        room = self.rooms.get(key.room)
        if room is not None and room.wire_key == key:
            room.ack_targets[lane] = abort.generation
            if room.state is not SenderState.DRAINING:
                self._ends.fail(room, Reason.ABORTED, "decode cancelled the request", tell=False)
            return
        self.pairing.forget(key)
        drained = ledger.drained(key)
        if ledger.tombstone(key) is None:
            ledger.bury(key, KVPoll.FAILED, reason=Reason.ABORTED, drained=drained)
        self.farewells.stop(key)
        if abort.generation is not None:
            ledger.send(lane, AbortAck(key, lane.rank, abort.generation, drained))

    def concluded(self, message: Concluded) -> None:
        """Decode has taken the final status."""
        self.farewells.stop(message.key)
        room = self.rooms.get(message.key.room)
        if room is None or room.wire_key != message.key or room.state is not SenderState.PUBLISHED:
            self._ledger.count("concluded_unknown")
            return
        if message.status == KVPoll.SUCCESS:
            self._ledger.advance(SENDER, room, SenderTrigger.CONCLUDED)
            self._ledger.emit(ConcludeLeg(room.key, None))
            self._ends.close(room, KVPoll.SUCCESS)
        else:
            self._ends.fail(
                room, parse_reason(message.reason), "decode refused what arrived", tell=False
            )

    # --- model and transport ---

    def granted(self, grant: Grant) -> None:
        """Pages of our own: compute."""
        room = self.rooms[grant.key.room]
        ledger = self._ledger
        assert grant.slot is not None
        room.pages, room.slot, room.computing = grant.pages, grant.slot, True
        for delivery in room.deliveries.values():
            route = delivery.route
            delivery.planner = RunPlanner(
                route.parts,
                sent_pages(route.mapping, route.source, sources=room.pages, targets=delivery.pages),
                prompt_tokens=room.leg.prompt_tokens,
                page_size=ledger.setup.layout.page_size,
                bytes_max=ledger.setup.limits.run_bytes_max,
            )
        ledger.advance(SENDER, room, SenderTrigger.ADMITTED, f"{len(room.pages)} pages")
        ledger.set_clock(Clock.STALL, room.key, ledger.setup.timeouts.stall_seconds)
        ledger.emit(StartPrefill(room.key, room.pages, room.slot))

    def rows_written(self, event: RowsWritten) -> None:
        """Rows are final: write what has become whole pages."""
        room = self._room(event.key)
        if room is None or room.state is not SenderState.COMPUTING:
            return
        self._progress(room)
        for delivery in room.deliveries.values():
            assert delivery.planner is not None
            delivery.planner.rows_written(event.region, event.end)
            self.writing.pump(room, delivery)

    def prompt_computed(self, key: Key) -> None:
        """The first token is chosen and its metadata row is written."""
        room = self._room(key)
        if room is None:
            return
        room.computing = False
        if room.state is SenderState.COMPUTING:
            self._progress(room)
            self._ledger.advance(SENDER, room, SenderTrigger.PROMPT_COMPUTED)
            self._push_on(room)
        else:
            self._ends.close_if_drained(room)

    def compute_stopped(self, key: Key, reason: Reason | None, detail: str) -> None:
        """The model let go of the pages, as asked or by its own failure."""
        room = self._room(key)
        if room is None:
            return
        room.computing = False
        if room.state is SenderState.COMPUTING:
            self._ends.fail(room, reason or Reason.MODEL_FAILED, detail)
        else:
            self._ends.close_if_drained(room)

    def operation_done(self, event: OperationDone) -> None:
        """A write ended; without success it is lost, not stopped."""
        ledger = self._ledger
        owner = self.writing.take(event.operation)
        room = None if owner is None else self._room(owner[0])
        delivery = None if room is None or owner is None else room.deliveries.get(owner[1])
        planned = None if delivery is None else delivery.outstanding.pop(event.operation, None)
        if room is None or delivery is None or planned is None:
            ledger.count("operation_unknown")
            return
        if event.ok:
            delivery.land(planned, event.digest)
            kind = "metadata" if planned.metadata else "kv"
            ledger.emit(CountBytes(kind, planned.nbytes * planned.pieces))
        else:
            delivery.fail(planned, event.detail)
            if room.state in ACTIVE and not ledger.deadlines.has((Clock.REWRITE, room.key)):
                ledger.set_clock(Clock.REWRITE, room.key, ledger.setup.limits.rewrite_seconds)
        if room.state is SenderState.DRAINING:
            self._ends.close_if_drained(room)
        elif event.ok:
            self._progress(room)
            if not (planned.metadata and delivery.outstanding):
                # Ten rows make the metadata of a request, and only the last of them moves it.
                self._push_on(room)

    # --- transport and peers ---

    def drained(self, reason: Reason) -> None:
        """No leg is taken any more, so early metadata waits for nothing."""
        self._meeting.close_door(reason)

    def transport_lost(self, rank: int) -> None:
        """A rank's transfer process is gone: what was outstanding may or may not have landed."""
        self.writing.forget_rank(rank)
        for room in list(self.rooms.values()):
            for delivery in room.deliveries.values():
                if delivery.lane.rank == rank:
                    delivery.lose_all()
            self._ends.close_if_drained(room)

    def transport_ready(self, rank: int) -> None:
        """A rank's new session: write again what was lost with the old one."""
        for room in list(self.rooms.values()):
            if room.state in ACTIVE:
                for delivery in room.deliveries.values():
                    if delivery.lane.rank == rank:
                        delivery.recover()
                self._push_on(room)

    def fenced(self) -> None:
        """All our own writers are gone: nobody reads the pages that wait for it."""
        self._ledger.absolve_fenced()

    def peer_died(self, incarnation: str, detail: str) -> None:
        """A decode instance is gone: its rooms end, nothing needs to be said to it."""
        self.pairing.forget_incarnation(incarnation)
        for room in list(self.rooms.values()):
            if any(d.incarnation == incarnation for d in room.deliveries.values()):
                self._ends.fail(room, Reason.PEER_DIED, f"decode died: {detail}", tell=False)

    # --- clocks ---

    def due(self, clock: Clock, key: Key) -> None:
        """A clock of a key ran out."""
        room = self._room(key)
        if clock is Clock.FAREWELL:
            self.farewells.due(key)
        elif clock is Clock.EARLY:
            self.pairing.forget(key)
            self._ledger.count("metadata_expired")
        elif room is not None and clock in TIMEOUTS:
            self._ends.fail(room, *TIMEOUTS[clock])
        elif room is not None:
            self._room_due(room, clock)

    def _room_due(self, room: PrefillRoom, clock: Clock) -> None:
        match clock:
            case Clock.REWRITE if room.state in ACTIVE:
                self._write_again(room)
            case Clock.ABORT:
                self._ends.overdue(room)
            case Clock.ACCEPT if room.state is not SenderState.DRAINING:
                self.writing.accept(room)
            case Clock.REPEAT if room.state is SenderState.PUBLISHED:
                self.writing.publish(room, repeated=True)
            case _:
                pass

    # --- inside ---

    def _room(self, key: Key) -> PrefillRoom | None:
        room = self.rooms.get(key.room)
        return room if room is not None and room.key == key else None

    def _progress(self, room: PrefillRoom) -> None:
        self._ledger.set_clock(Clock.STALL, room.key, self._ledger.setup.timeouts.stall_seconds)

    def _push_on(self, room: PrefillRoom) -> None:
        """Write what may be written; publish when nothing is left."""
        for delivery in room.deliveries.values():
            self.writing.pump(room, delivery)
            if room.state is SenderState.FLUSHING and delivery.kv_landed:
                self.writing.write_metadata(room, delivery)
        if room.state is SenderState.FLUSHING and all(d.landed for d in room.deliveries.values()):
            self._ledger.advance(SENDER, room, SenderTrigger.ALL_LANDED)
            self._ledger.stop_clocks(room.key, (Clock.STALL, Clock.REWRITE, Clock.ACCEPT))
            self.writing.publish(room, repeated=False)

    def _retargeted(self, room: PrefillRoom, known: Delivery) -> None:
        """A destination's memory is mapped anew: what was sent to the old one is sent again."""
        self.writing.forget(room.key, known.lane)
        if room.state in ACTIVE:
            if not any(delivery.lost for delivery in room.deliveries.values()):
                self._ledger.stop_clocks(room.key, (Clock.REWRITE,))
            self._push_on(room)
        else:
            self._ends.close_if_drained(room)

    def _write_again(self, room: PrefillRoom) -> None:
        """Send what was lost to the same session: the same bytes to the same place harm nobody.

        That an earlier try of them may still land is not forgotten (`drained`), nor that it reads
        our pages (`reading`). Without a session of our own we are still replacing our transport,
        and the stall clock bounds that.
        """
        lost = [delivery for delivery in room.deliveries.values() if delivery.lost]
        for delivery in lost:
            if self._ledger.ranks[delivery.lane.rank].session is None:
                continue
            delivery.rewrites += 1
            if delivery.rewrites > self._ledger.setup.limits.rewrites_max:
                detail = f"a write failed {delivery.rewrites} times: {delivery.failure}"
                self._ends.fail(room, Reason.TRANSFER_FAILED, detail)
                return
            delivery.recover()
        if lost:
            self._ledger.set_clock(
                Clock.REWRITE, room.key, self._ledger.setup.limits.rewrite_seconds
            )
            self._push_on(room)
