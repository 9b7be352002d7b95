"""The participants of a dialect: one node per data-parallel rank, `handle(event, now) → effects`.

`prefill_node` and `decode_node` make the two nodes of the push dialect. A node has one or more
ranks (`ranks`) and routes each event to the machine it concerns, then lets waiting requests have
what was freed, then considers a fence. It never blocks and a peer's fault never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import msgspec

from pdcluster_protocol.admission import Grant
from pdcluster_protocol.alone import AloneRooms
from pdcluster_protocol.effects import ConcludeLeg, Effect, Report, StopCompute
from pdcluster_protocol.errors import LocalProtocolError, Reason
from pdcluster_protocol.events import (
    ComputeStopped,
    DecodeFinished,
    Drained,
    Event,
    Joined,
    LegArrived,
    LegCancelled,
    MessageArrived,
    PeerStateChanged,
    Tick,
    TransportLost,
    TransportReady,
)
from pdcluster_protocol.fencing import Fencing
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import TAKES_NOTHING_NEW, Clock, Ledger, NodeSetup
from pdcluster_protocol.messages import KVPoll, Load, NodeMessage, PeerState
from pdcluster_protocol.pages import page_runs
from pdcluster_protocol.push.decode_rooms import DecodeRooms
from pdcluster_protocol.push.prefill_rooms import PrefillRooms
from pdcluster_protocol.ranks import OwnRank
from pdcluster_protocol.story import Transition


class RoomView(Protocol):
    """What dumps and invariants see of any room."""

    key: Key
    leg: LegArrived

    @property
    def state(self) -> str:
        """The name of its state."""


class Side(Protocol):
    """The rooms of one role: what a node needs of `PrefillRooms` and `DecodeRooms`."""

    def leg_arrived(self, leg: LegArrived) -> None:
        """A leg that the node has let in."""

    def cancel(self, key: Key, reason: Reason, detail: str) -> bool:
        """End a room from its HTTP side; whether there is such a room."""

    def message(self, message: NodeMessage, incarnation: str, rank: int) -> None:
        """A peer's message to one of our ranks."""

    def local(self, event: Event) -> None:
        """What the model, the transport's operations or the sidecar answered."""

    def abandon(self, key: Key) -> Key:
        """Forget a room in whatever state; the key by which its peer knows it."""

    def granted(self, grant: Grant) -> None:
        """Pages for a room that waited."""

    def due(self, clock: Clock, key: Key) -> None:
        """A clock ran out."""

    def drained(self, reason: Reason) -> None:
        """Nothing new is taken from now on."""

    def transport_lost(self, rank: int) -> None:
        """A rank's transport is gone."""

    def fenced(self) -> None:
        """Every mapping through which a peer could write is gone."""

    def transport_ready(self, rank: int) -> None:
        """A rank's new transport session."""

    def peer_died(self, incarnation: str, detail: str) -> None:
        """A peer instance is gone."""

    def views(self) -> Sequence[RoomView]:
        """Open rooms."""

    def live_key(self, room: int) -> Key | None:
        """The key of the open room with this number."""

    def writable_count(self) -> int:
        """Rooms whose pages a peer may be writing now: a fence would delay them."""

    def waiting_count(self) -> int:
        """Entries outside rooms: early metadata, farewells."""


class Node:
    """One data-parallel rank of one role."""

    __slots__ = ("_failing_alone", "alone", "fencing", "ledger", "side")

    def __init__(self, setup: NodeSetup, side: Callable[[Ledger], Side]) -> None:
        self.ledger = Ledger(setup)
        self.alone = AloneRooms(self.ledger)
        self.fencing = Fencing(self.ledger)
        self.side = side(self.ledger)
        self._failing_alone = FailingAlone(self._condemn)

    # --- the interface ---

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at a time `now` (monotonic seconds); return what to do."""
        self.ledger.now = now
        self._route(event)
        if self.ledger.queue and self.ledger.ready and not self.ledger.fencing:
            while (grant := self.ledger.queue.admit()) is not None:
                with self._failing_alone:
                    self._granted(grant)
        if self.ledger.pool.quarantined_count or self.ledger.contacts.gone:
            self.fencing.consider(bystanders=self.side.writable_count())
        return self.ledger.take_effects()

    def deadline(self) -> float | None:
        """The latest time for the next `handle(Tick(), now)`."""
        return self.ledger.deadlines.next()

    def load(self) -> Load:
        """Free pages, open rooms, queue: what a router chooses by."""
        pool = self.ledger.pool
        return Load(
            pages_free=pool.free_count,
            pages_total=pool.size,
            pages_quarantined=pool.quarantined_count,
            rooms_open=len(self.side.views()) + len(self.alone.rooms),
            queued=len(self.ledger.queue),
        )

    def open_keys(self) -> tuple[Key, ...]:
        """Rooms that are not concluded, for the snapshot to a restarted sidecar."""
        return tuple(room.key for room in self.side.views())

    def story(self, key: Key) -> tuple[Transition, ...]:
        """What happened to this attempt."""
        return self.ledger.stories.of(key)

    def views(self) -> list[RoomView]:
        """Every open room, those without a peer included."""
        return [*self.side.views(), *self.alone.rooms.values()]

    def dump(self) -> dict[str, object]:
        """Rooms, pages and stories, for people."""
        pool = self.ledger.pool
        return {
            "incarnation": self.ledger.incarnation,
            "ranks": [_describe_rank(rank) for rank in self.ledger.ranks],
            "pages": {
                "free": pool.free_count,
                "owned": pool.owned_count,
                "quarantined": pool.quarantined_count,
            },
            "slots_free": self.ledger.slots.free_count,
            "queued": len(self.ledger.queue),
            "rooms": [self._describe(view) for view in self.views()],
        }

    # --- inside ---

    def _describe(self, view: RoomView) -> dict[str, object]:
        return {
            "room": view.key.room,
            "attempt": view.key.attempt,
            "rid": view.leg.rid,
            "state": str(view.state),
            "prompt_tokens": view.leg.prompt_tokens,
            "pages": page_runs(self.ledger.pool.pages_of(view.key)),
            "story": [str(step) for step in self.story(view.key)],
        }

    def _granted(self, grant: Grant) -> None:
        if grant.key in self.alone.rooms:
            self.alone.granted(grant)
        else:
            self.side.granted(grant)

    def _route(self, event: Event) -> None:
        match event:
            case Tick():
                for clock, key in self.ledger.deadlines.due(self.ledger.now):
                    with self._failing_alone:
                        self.side.due(clock, key)
                        self.alone.due(clock, key)
            case Joined() | Drained() | TransportReady() | TransportLost() | PeerStateChanged():
                self._surroundings(event)
            case _:
                with self._failing_alone:
                    self._one_room(event)

    def _one_room(self, event: Event) -> None:
        match event:
            case LegArrived():
                self._leg(event)
            case LegCancelled():
                self._cancel(event)
            case MessageArrived():
                self.side.message(event.message, event.incarnation, event.rank)
            case DecodeFinished():
                self.side.local(event)
                self.alone.finished(event.key)
            case ComputeStopped():
                self.side.local(event)
                self.alone.stopped(event.key, event.reason, event.detail)
            case _:
                self.side.local(event)

    def _condemn(self, key: Key, fault: LocalProtocolError) -> None:
        ledger = self.ledger
        ledger.emit(Report(key, fault.reason, fault.detail))
        ledger.count("core_fault")
        wire_key = self.side.abandon(key)
        self.alone.rooms.pop(key, None)
        ledger.queue.remove(key)
        ledger.stop_clocks(key)
        for pool in (ledger.pool, ledger.slots):
            pool.condemn(key, ledger.now)
        ledger.emit(ConcludeLeg(key, fault.reason, fault.detail))
        ledger.emit(StopCompute(key))
        ledger.bury(wire_key, KVPoll.FAILED, reason=fault.reason, drained=False)

    def _surroundings(
        self, event: Joined | Drained | TransportReady | TransportLost | PeerStateChanged
    ) -> None:
        ledger = self.ledger
        match event:
            case Joined():
                ledger.incarnation = event.incarnation
                ledger.ranks[event.rank].address = event.address
            case Drained():
                ledger.draining = event.reason
                self.side.drained(event.reason)
            case TransportReady():
                ledger.transport_ready(event.rank, event.session, event.base_address)
                self.side.transport_ready(event.rank)
            case TransportLost():
                fenced = ledger.transport_lost(event.rank)
                self.side.transport_lost(event.rank)
                if fenced:
                    self.side.fenced()
            case PeerStateChanged():
                if event.state is PeerState.DEAD:
                    self.side.peer_died(event.incarnation, event.detail)
            case _:
                assert_never(event)

    def _cancel(self, cancel: LegCancelled) -> None:
        key, reason, detail = cancel.key, cancel.reason, cancel.detail
        known = self.side.cancel(key, reason, detail) or self.alone.cancel(key, reason, detail)
        if not known and self.ledger.tombstone(key) is None:
            # It has overtaken its leg, which must find it when it comes.
            self.ledger.bury(key, KVPoll.FAILED, reason=reason)

    def _leg(self, leg: LegArrived) -> None:
        refusal = self._refusal(leg)
        if refusal is not None:
            self._refuse(leg, *refusal)
        elif leg.bootstrap is None:
            self.alone.leg_arrived(leg)
        else:
            self.ledger.saw_attempt(leg.key)
            self.side.leg_arrived(leg)

    def _refuse(self, leg: LegArrived, reason: Reason, detail: str) -> None:
        self.ledger.emit(ConcludeLeg(leg.key, reason, detail))
        double = leg.bootstrap is None or leg.key == self.side.live_key(leg.key.room)
        if leg.attempt_known and not double and reason is not Reason.OVERLOADED:
            # Decode may wait for this leg, with no router left to end it: its metadata must find
            # the cause. Under overload the table is needed for keys that wrote.
            self._cancel(LegCancelled(leg.key, reason, detail))

    def _refusal(self, leg: LegArrived) -> tuple[Reason, str] | None:
        """Why a leg cannot be taken, found before anything is queued."""
        ledger = self.ledger
        if ledger.draining is not None:
            return ledger.draining, TAKES_NOTHING_NEW
        too_large = self._too_large(leg)
        if too_large:
            return Reason.TOO_LARGE, too_large
        if len(self.views()) >= ledger.setup.limits.rooms_max:
            return Reason.OVERLOADED, f"{ledger.setup.limits.rooms_max} rooms are open"
        if leg.bootstrap is None:
            live = leg.key in self.alone.rooms
            return (Reason.ROOM_IN_USE, f"{leg.key} is computed here already") if live else None
        if leg.attempt_known and ledger.is_stale(leg.key):
            return Reason.STALE_ATTEMPT, "the attempt is older than any that can be alive"
        return self._name_taken(leg)

    def _name_taken(self, leg: LegArrived) -> tuple[Reason, str] | None:
        """Whether its key has ended already, or its room is live."""
        room = leg.key.room
        if self.ledger.tombstone(leg.key) is not None:
            if leg.attempt_known:
                return Reason.ABORTED, "the request was cancelled before its leg arrived"
            # Without an attempt an older use of the same number cannot be told from this one.
            detail = f"room {room} was used here not long ago; take another room"
            return Reason.ROOM_IN_USE, detail
        if self.side.live_key(room) is not None:
            return Reason.ROOM_IN_USE, f"room {room} is live here"
        return None

    def _too_large(self, leg: LegArrived) -> str:
        setup = self.ledger.setup
        tokens = leg.prompt_tokens + leg.output_tokens_max
        if setup.layout.pages_for(tokens) <= setup.page_count:
            return ""
        capacity = setup.page_count * setup.layout.page_size
        return f"prompt and answer need {tokens} tokens of KV, the pool holds {capacity}"


class FailingAlone:
    """Around what concerns one room: a fault of ours ends that room, not the engine.

    Its pages stay locked, since nobody can say any more who uses them. A fault without a key, or in
    an event of all rooms, goes up and ends the process.
    """

    __slots__ = ("_condemn",)

    def __init__(self, condemn: Callable[[Key, LocalProtocolError], None]) -> None:
        self._condemn = condemn

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, _kind: object, fault: BaseException | None, _traceback: object) -> bool:
        if not isinstance(fault, LocalProtocolError) or fault.key is None:
            return False
        self._condemn(fault.key, fault)
        return True


def _describe_rank(rank: OwnRank) -> dict[str, object]:
    place = rank.place
    return {
        "coordinate": msgspec.to_builtins(place.coordinate),
        "address": str(rank.address),
        "transport_session": rank.session or "",
    }


def prefill_node(setup: NodeSetup) -> Node:
    """The prefill side of one data-parallel rank, push dialect."""
    return Node(setup, PrefillRooms)


def decode_node(setup: NodeSetup) -> Node:
    """The decode side of one data-parallel rank, push dialect."""
    return Node(setup, DecodeRooms)
