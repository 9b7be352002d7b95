"""All decode rooms of one node: events in, effects through the ledger.

A room resolves its prefill instance, reserves and locks pages and a slot, sends their numbers,
verifies what lands, hands over to the model, and releases. Whatever ends it while prefill may still
write sends its pages to quarantine and an ABORT to every rank that was given addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_protocol.admission import Grant
from pdcluster_protocol.effects import (
    ClearMetadata,
    ConcludeLeg,
    ReadMetadata,
    StartDecode,
)
from pdcluster_protocol.errors import Reason, parse_reason
from pdcluster_protocol.events import (
    ComputeStopped,
    DecodeFinished,
    Event,
    LegArrived,
    MetadataRead,
    OperationDone,
    PeerResolved,
)
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import (
    AbortAck,
    Accepted,
    Concluded,
    KVPoll,
    NodeMessage,
    RunsLanded,
    Status,
)
from pdcluster_protocol.push.aborts import Aborts
from pdcluster_protocol.push.decode_ends import DecodeEnds
from pdcluster_protocol.push.decode_room import WRITABLE, DecodeRoom
from pdcluster_protocol.push.landing import Landing, last_runs
from pdcluster_protocol.push.publishing import Publishing
from pdcluster_protocol.push.receiver import RECEIVER, ReceiverState, ReceiverTrigger
from pdcluster_protocol.push.resolution import Resolution
from pdcluster_protocol.rank_mapping import Purpose
from pdcluster_protocol.ranks import Lane


class DecodeRooms:
    """The table of decode rooms; a decode `nodes.Node` routes events here."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.rooms: dict[int, DecodeRoom] = {}
        self._verifications: dict[int, tuple[Key, int]] = {}
        """Whose they are, and in which of our ranks."""
        self.publishing = Publishing(ledger)
        self.aborts = Aborts(ledger)
        self._ends = DecodeEnds(ledger, self.rooms, self.aborts)
        self._resolution = Resolution(ledger, self.rooms, self._ends)

    # --- what the node sees ---

    def views(self) -> Sequence[DecodeRoom]:
        """Open rooms."""
        return tuple(self.rooms.values())

    def live_key(self, room: int) -> Key | None:
        """The key of the open room with this number."""
        found = self.rooms.get(room)
        return None if found is None else found.key

    def writable_count(self) -> int:
        """Rooms whose pages prefill may be writing now."""
        return sum(room.state in WRITABLE for room in self.rooms.values())

    def waiting_count(self) -> int:
        """Decode keeps nothing outside its rooms."""
        return 0

    def message(self, message: NodeMessage, incarnation: str, rank: int) -> None:
        """A prefill rank's message to one of our ranks."""
        match message:
            case Accepted():
                self.accepted(message)
            case RunsLanded():
                self.runs_landed(message, rank)
            case Status():
                self.status_arrived(message, rank)
            case AbortAck():
                self.abort_acknowledged(message, incarnation, rank)
            case _:
                self._ledger.count("message_for_the_other_role")

    def local(self, event: Event) -> None:
        """What sidecar, model and executor answered."""
        match event:
            case PeerResolved():
                self._resolution.answered(event)
            case OperationDone():
                self.operation_done(event)
            case MetadataRead():
                self.metadata_read(event)
            case DecodeFinished():
                self.decode_finished(event.key)
            case ComputeStopped():
                self.compute_stopped(event.key, event.reason, event.detail)
            case _:
                self._ledger.count("event_for_the_other_role")

    # --- legs ---

    def leg_arrived(self, leg: LegArrived) -> None:
        """A leg whose room, size and attempt were checked by the node."""
        ledger = self._ledger
        room = DecodeRoom(leg)
        self.rooms[leg.key.room] = room
        ledger.set_clock(Clock.BOOTSTRAP, room.key, ledger.setup.timeouts.bootstrap_seconds)
        self._resolution.ask(room)

    def cancel(self, key: Key, reason: Reason, detail: str) -> bool:
        """The leg's HTTP side gave up."""
        room = self._room(key)
        if room is not None:
            self._ends.fail(room, reason, detail)
        return room is not None

    def abandon(self, key: Key) -> Key:
        """Forget a room in whatever state; nobody will be asked for proof."""
        if self._room(key) is not None:
            del self.rooms[key.room]
            self.aborts.end(key)
        return key

    def granted(self, grant: Grant) -> None:
        """Pages and slot are reserved and locked: now, and only now, say their numbers."""
        room = self.rooms[grant.key.room]
        ledger = self._ledger
        timeouts = ledger.setup.timeouts
        assert grant.slot is not None
        room.pages, room.slot, room.epoch = grant.pages, grant.slot, ledger.pool.epoch
        room.landings = tuple(
            Landing(
                ledger,
                own,
                pages=room.pages,
                slot=room.slot,
                prompt_tokens=room.leg.prompt_tokens,
                ranks=frozenset(peer.rank for peer in peers if peer.purpose is Purpose.REAL),
            )
            for own, peers in zip(ledger.ranks, room.prefill_ranks, strict=True)
        )
        ledger.emit(ClearMetadata(room.slot))
        ledger.advance(RECEIVER, room, ReceiverTrigger.ADMITTED, f"{len(room.pages)} pages")
        ledger.stop_clocks(room.key, (Clock.BOOTSTRAP,))
        ledger.set_clock(Clock.STALL, room.key, timeouts.stall_seconds)
        total_seconds = room.leg.budget_seconds or timeouts.transfer_seconds
        ledger.set_clock(Clock.TOTAL, room.key, total_seconds)
        self.publishing.publish(room)

    # --- prefill's messages ---

    def accepted(self, message: Accepted) -> None:
        """Prefill has the page numbers, or still has them: a sign of life."""
        room = self._room(message.key)
        if room is None or room.state not in WRITABLE:
            self._ledger.count("accepted_unknown")
            return
        self._alive(room)

    def runs_landed(self, message: RunsLanded, rank: int) -> None:
        """Runs were written to one of our ranks: verify them."""
        room = self._room(message.key)
        if room is None or room.state not in WRITABLE:
            self._ledger.count("runs_unknown")
            return
        self._landed(room, message, rank)

    def status_arrived(self, status: Status, rank: int) -> None:
        """A prefill rank's final word to one of our ranks."""
        ledger, key = self._ledger, status.key
        room = self._room(key)
        if room is None or room.state not in WRITABLE:
            self._answer_late(room, status, rank)
            return
        if status.status == KVPoll.FAILED:
            self._ends.fail(
                room, parse_reason(status.reason), f"prefill: {status.detail or status.reason}"
            )
            self._answer_late(self._room(key), status, rank)
        elif status.status == KVPoll.SUCCESS:
            ours = (room.leg.prompt_tokens, room.leg.prompt_digest)
            if status.prompt_digest and (status.prompt_tokens, status.prompt_digest) != ours:
                self._ends.fail(room, Reason.TOKEN_MISMATCH, "prefill computed other token ids")
                return
            self._landed(room, last_runs(status, room.epoch), rank, final=status)
        else:
            ledger.count("status_unexpected")

    def abort_acknowledged(self, ack: AbortAck, incarnation: str, rank: int) -> None:
        """A rank says that nothing of this key is written any more."""
        room = self._room(ack.key)
        if room is None or room.state is not ReceiverState.DRAINING:
            self._ledger.count("abort_ack_unknown")
            return
        if self.aborts.acknowledged(room.key, ack, incarnation, rank):
            self._ends.proven(room)

    # --- executor's answers ---

    def operation_done(self, event: OperationDone) -> None:
        """A verification ended; one that a dead room asked for means nothing."""
        key, rank = self._verifications.pop(event.operation, (None, 0))
        room = None if key is None else self._room(key)
        if room is None or room.state not in WRITABLE:
            self._ledger.count("operation_unknown")
            return
        if not event.ok:
            self._ends.fail(room, Reason.TRANSFER_FAILED, f"verification failed: {event.detail}")
            return
        wrong = room.landings[rank].verified(event.operation, event.digest)
        if wrong is None:
            self._complete(room)
        else:
            self._ends.fail(
                room,
                Reason.CHECKSUM_MISMATCH,
                f"region {wrong.region} page {wrong.first_page}: {wrong.nbytes} bytes are not"
                " what prefill wrote",
                trusted=False,
            )

    def metadata_read(self, event: MetadataRead) -> None:
        """The room echo in the slot: the last check before the model may read."""
        room = self._room(event.key)
        if room is None or room.state is not ReceiverState.LANDED:
            return
        if event.room != room.key.room:
            self._ends.fail(
                room,
                Reason.METADATA_CORRUPT,
                f"the slot says room {event.room}, not ours",
                trusted=False,
            )
            return
        ledger = self._ledger
        ledger.stop_clocks(room.key)
        ledger.advance(RECEIVER, room, ReceiverTrigger.ROOM_ECHOED)
        for lane in room.lanes():
            ledger.send(lane, Concluded(room.key, KVPoll.SUCCESS))
        ledger.emit(StartDecode(room.key, room.pages, room.slot))

    def decode_finished(self, key: Key) -> None:
        """The last token is out."""
        room = self._room(key)
        if room is None:
            return
        if room.state is ReceiverState.RUNNING:
            self._ledger.advance(RECEIVER, room, ReceiverTrigger.ANSWERED)
            self._ledger.emit(ConcludeLeg(key, None))
            self._ends.close(room, KVPoll.SUCCESS)
        elif room.state is ReceiverState.STOPPING:
            self.compute_stopped(key, None, "")

    def compute_stopped(self, key: Key, reason: Reason | None, detail: str) -> None:
        """The model let go of the pages, as asked or by its own failure."""
        room = self._room(key)
        if room is None:
            return
        if room.state is ReceiverState.RUNNING:
            self._ends.fail(room, reason or Reason.MODEL_FAILED, detail, stop=False)
        if room.state is ReceiverState.STOPPING:
            self._ledger.advance(RECEIVER, room, ReceiverTrigger.MODEL_STOPPED)
            self._ends.close(room, KVPoll.FAILED)

    # --- transport and peers ---

    def drained(self, _reason: Reason) -> None:
        """Whoever was let in goes on, also one that waits for pages."""

    def transport_lost(self, rank: int) -> None:
        """A rank's mapping is gone: what was verified in it must be verified again."""
        for operation in [n for n, (_, own) in self._verifications.items() if own == rank]:
            del self._verifications[operation]

    def fenced(self) -> None:
        """Every mapping through which a write could land is gone: quarantine ends."""
        for key in self._ledger.absolve_fenced():
            room = self._room(key)
            if room is not None and room.state is ReceiverState.DRAINING:
                self._ends.proven(room, "fenced")

    def transport_ready(self, rank: int) -> None:
        """A rank's new session; with the last one tell every prefill rank that may write."""
        self.publishing.forget_session()
        for room in list(self.rooms.values()):
            if room.state in WRITABLE and room.landings:
                room.landings[rank].restart()
                self._own_operations(room, rank)
                self.publishing.publish(room)

    def peer_died(self, incarnation: str, detail: str) -> None:
        """A prefill instance is gone: what it wrote last may still land, so only a fence helps."""
        self._resolution.forget(incarnation)
        for room in list(self.rooms.values()):
            if room.card is None or room.card.incarnation != incarnation:
                continue
            if room.state is ReceiverState.DRAINING:
                self.aborts.unprovable(room.key)
            elif room.state in (*WRITABLE, ReceiverState.ADMITTING):
                self._ends.fail(room, Reason.PEER_DIED, f"prefill died: {detail}", provable=False)

    # --- clocks and ends ---

    def due(self, clock: Clock, key: Key) -> None:
        """A clock of a key ran out."""
        room = self._room(key)
        if room is None:
            return
        match clock:
            case Clock.BOOTSTRAP:
                waits = "prefill's address" if room.card is None else "free pages"
                self._ends.fail(room, Reason.BOOTSTRAP_TIMEOUT, f"waited too long for {waits}")
            case Clock.STALL:
                self._ends.fail(room, Reason.STALLED, "prefill made no progress")
            case Clock.TOTAL:
                self._ends.fail(room, Reason.WAITING_TIMEOUT, "the transfer's budget ran out")
            case Clock.ABORT:
                self.aborts.unprovable(key)
            case Clock.REPEAT:
                self._repeat(room)
            case _:
                pass

    def _repeat(self, room: DecodeRoom) -> None:
        if room.state is ReceiverState.RESOLVING:
            self._resolution.ask(room)
        elif room.state is ReceiverState.DRAINING:
            self.aborts.repeat(room.key)
        elif room.state in WRITABLE:
            self.publishing.repeat(room)

    # --- inside ---

    def _room(self, key: Key) -> DecodeRoom | None:
        room = self.rooms.get(key.room)
        return room if room is not None and room.key == key else None

    def _own_operations(self, room: DecodeRoom, rank: int) -> None:
        """Remember whose the verifications are that one of our ranks has under way."""
        operations = room.landings[rank].operations()
        self._verifications.update(dict.fromkeys(operations, (room.key, rank)))

    def _landed(
        self, room: DecodeRoom, message: RunsLanded, rank: int, *, final: Status | None = None
    ) -> None:
        if message.epoch != room.epoch:
            self._ledger.count("runs_stale")
            return
        self._alive(room)
        landing = room.landings[rank]
        fault = landing.announce(message)
        self._own_operations(room, rank)
        if fault:
            self._ends.fail(room, Reason.WIRE_ERROR, fault)
            return
        if final is not None:
            landing.succeeded(final)
        self._complete(room)

    def _alive(self, room: DecodeRoom) -> None:
        self._ledger.set_clock(Clock.STALL, room.key, self._ledger.setup.timeouts.stall_seconds)
        if room.state is ReceiverState.PUBLISHED:
            self._ledger.advance(RECEIVER, room, ReceiverTrigger.PREFILL_ALIVE)

    def _complete(self, room: DecodeRoom) -> None:
        if room.state is not ReceiverState.TRANSFERRING or not room.complete:
            return
        for landing in room.landings:
            fault = landing.coverage_fault()
            if fault:
                self._ends.fail(room, Reason.TRANSFER_FAILED, fault)
                return
        self._ledger.advance(RECEIVER, room, ReceiverTrigger.ALL_VERIFIED)
        self._ledger.emit(ReadMetadata(room.key, room.slot))

    def _answer_late(self, room: DecodeRoom | None, status: Status, rank: int) -> None:
        """A status that changes nothing here is still answered, or prefill repeats it."""
        final, reason = KVPoll.FAILED, ""
        if room is not None:
            final = KVPoll.SUCCESS if room.state is ReceiverState.RUNNING else KVPoll.FAILED
            reason = room.cause
        elif (buried := self._ledger.tombstone(status.key)) is not None:
            final, reason = KVPoll(buried.status), buried.reason
        self._ledger.count("status_late")
        if status.reply_to is not None:
            lane = Lane(rank, status.reply_to)
            self._ledger.send(lane, Concluded(status.key, final, reason))
