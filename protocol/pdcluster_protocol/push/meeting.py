"""Where a leg and decode's metadata meet: by room, whichever comes first.

The first one waits, bounded and with a deadline. Prompt length and digest are compared before the
first write. A room goes on when each of our ranks that writes knows all its destinations.
"""

from __future__ import annotations

from collections.abc import Callable

from pdcluster_protocol.admission import Need
from pdcluster_protocol.errors import LayoutMismatch, Reason
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import TAKES_NOTHING_NEW, Clock, Ledger
from pdcluster_protocol.messages import Accepted, KVPoll
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.destinations import Destination
from pdcluster_protocol.push.pairing import Arrived, Pairing, Refusal
from pdcluster_protocol.push.prefill_ends import PrefillEnds
from pdcluster_protocol.push.prefill_room import PrefillRoom
from pdcluster_protocol.push.sender import SENDER, SenderState, SenderTrigger
from pdcluster_protocol.ranks import Lane


class Meeting:
    """Brings legs and metadata together; shares the table of rooms with `PrefillRooms`."""

    __slots__ = ("_ends", "_ledger", "_pairing", "_retargeted", "_rooms")

    def __init__(
        self,
        ledger: Ledger,
        rooms: dict[int, PrefillRoom],
        pairing: Pairing,
        ends: PrefillEnds,
        retargeted: Callable[[PrefillRoom, Delivery], None],
    ) -> None:
        self._ledger = ledger
        self._rooms = rooms
        self._pairing = pairing
        self._ends = ends
        self._retargeted = retargeted

    def leg_arrived(self, room: PrefillRoom) -> None:
        """A new room takes the metadata that waited for it."""
        leg = room.leg
        for arrived in self._pairing.take(leg.key, attempt_known=leg.attempt_known):
            if room.wire_key in (None, arrived.metadata.key):
                self._pair(room, arrived)

    def metadata_arrived(self, arrived: Arrived) -> None:
        """Decode's pages are reserved and locked; these are their numbers."""
        ledger, lane, key = self._ledger, arrived.lane, arrived.metadata.key
        room, buried = self._rooms.get(key.room), ledger.tombstone(key)
        if buried is None and room is not None and room.wire_key in (None, key):
            self._pair(room, arrived)
        elif buried is not None or ledger.is_stale(key):
            ledger.count("metadata_late")
            if buried is None or buried.status != KVPoll.SUCCESS:
                reason = buried.reason if buried else Reason.STALE_ATTEMPT
                self._ends.farewells.say(key, (lane,), reason=reason, detail="concluded")
        elif ledger.draining is not None:
            self._turn_away(key, (lane,), ledger.draining)
        elif self._pairing.wait(arrived):
            ledger.send(lane, Accepted(key, lane.rank))

    def close_door(self, reason: Reason) -> None:
        """No leg comes any more: whoever waits for one hears it now."""
        for key in self._pairing.waiting_keys():
            waiting = self._pairing.take(key, attempt_known=True)
            self._turn_away(key, tuple(arrived.lane for arrived in waiting), reason)

    def _turn_away(self, key: Key, lanes: tuple[Lane, ...], reason: Reason) -> None:
        self._ends.farewells.say(key, lanes, reason=reason, detail=TAKES_NOTHING_NEW)

    def _pair(self, room: PrefillRoom, arrived: Arrived) -> None:
        ledger, lane, metadata = self._ledger, arrived.lane, arrived.metadata
        destination = self._pairing.destination(metadata, arrived.incarnation)
        if destination is None:
            # The registration is lost or late, or this is; decode repeats both until we accept.
            ledger.count("metadata_without_registration")
            return
        if room.wire_key is None:
            room.wire_key = metadata.key
        known = room.deliveries.get(lane)
        if known is None and room.state is SenderState.BOOTSTRAPPING:
            self._match(room, arrived, destination)
            return
        if room.state is not SenderState.DRAINING:
            ledger.send(lane, Accepted(metadata.key, lane.rank))
        if known is None:
            ledger.count("metadata_unexpected")
            return
        known.answered = True
        if isinstance(destination, Destination) and destination.follows(known.destination):
            known.retarget(destination)
            self._retargeted(room, known)

    def _match(
        self, room: PrefillRoom, arrived: Arrived, destination: Destination | LayoutMismatch
    ) -> None:
        match self._pairing.match(room.leg, arrived, destination):
            case Delivery() as delivery:
                self._add_delivery(room, delivery)
            case Refusal(reason, detail):
                key = arrived.metadata.key
                self._ends.farewells.say(key, (arrived.lane,), reason=reason, detail=detail)
                self._ends.fail(room, reason, detail)
            case None:
                # Nothing else will be said to a rank that gets no rows.
                self._ledger.send(arrived.lane, Accepted(arrived.metadata.key, arrived.lane.rank))
                self._ledger.count("metadata_dummy")

    def _add_delivery(self, room: PrefillRoom, delivery: Delivery) -> None:
        room.mapping = room.mapping or delivery.route.mapping
        claim = (delivery.lane.rank, delivery.route.destination)
        claimed = {(d.lane.rank, d.route.destination) for d in room.deliveries.values()}
        if room.mapping != delivery.route.mapping or claim in claimed:
            detail = "decode ranks of two replicas claim this room"
            self._ends.fail(room, Reason.RANK_CONFLICT, detail)
            return
        room.deliveries[delivery.lane] = delivery
        ledger = self._ledger
        if not ledger.deadlines.has((Clock.ACCEPT, room.key)):
            # What follows mostly says it sooner.
            ledger.set_clock(Clock.ACCEPT, room.key, ledger.setup.limits.accept_seconds)
        if len(room.deliveries) < self._pairing.routes.deliveries(room.mapping):
            return
        ledger.stop_clocks(room.key, (Clock.BOOTSTRAP,))
        ledger.advance(SENDER, room, SenderTrigger.PAGES_KNOWN)
        pages = ledger.setup.layout.pages_for(room.leg.prompt_tokens)
        ledger.queue.add(room.key, Need(pages=pages, slot=True))
