"""Who serves a bootstrap address, and which of its ranks: the first step of a decode room.

The question goes to our own sidecar and is repeated, since that may be restarting. The answer is
the instance's card, already found compatible; from it come the ranks that will write, all of which
are given addresses.
"""

from __future__ import annotations

from pdcluster_protocol.admission import Need
from pdcluster_protocol.effects import ResolvePeer
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import PeerResolved
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import InstanceCard
from pdcluster_protocol.push.decode_ends import DecodeEnds
from pdcluster_protocol.push.decode_room import DecodeRoom
from pdcluster_protocol.push.receiver import RECEIVER, ReceiverState, ReceiverTrigger


class Resolution:
    """Finds the prefill ranks of rooms; shares the table of rooms with `DecodeRooms`."""

    __slots__ = ("_ends", "_ledger", "_rooms")

    def __init__(self, ledger: Ledger, rooms: dict[int, DecodeRoom], ends: DecodeEnds) -> None:
        self._ledger = ledger
        self._rooms = rooms
        self._ends = ends

    def ask(self, room: DecodeRoom) -> None:
        """Ask, and ask again when the clock rings: the question may have been lost."""
        assert room.leg.bootstrap is not None
        self._ledger.emit(ResolvePeer(room.leg.bootstrap))
        seconds = self._ledger.setup.limits.retransmit_seconds_max
        self._ledger.set_clock(Clock.REPEAT, room.key, seconds)

    def answered(self, event: PeerResolved) -> None:
        """Who the prefill instance is; every room that asked goes on or ends."""
        for room in list(self._rooms.values()):
            if room.state is not ReceiverState.RESOLVING or room.leg.bootstrap != event.bootstrap:
                continue
            if event.card is None:
                reason = event.reason or Reason.PEER_UNREACHABLE
                self._ends.fail(room, reason, event.detail)
            else:
                self._found(room, event.card)

    def _found(self, room: DecodeRoom, card: InstanceCard) -> None:
        ledger = self._ledger
        dp_rank = room.leg.prefill_dp_rank
        if dp_rank is None:
            dp_rank = room.key.room % card.parallel.dp
        room.card = card
        room.ranks = tuple(rank for rank in card.ranks if rank.coordinate.dp == dp_rank)
        if not room.ranks:
            self._ends.fail(
                room,
                Reason.RANK_CONFLICT,
                f"prefill {card.instance} has no DP rank {dp_rank}; it has {card.parallel.dp}",
            )
            return
        ledger.stop_clocks(room.key, (Clock.REPEAT,))
        ledger.advance(RECEIVER, room, ReceiverTrigger.PEER_KNOWN, card.instance)
        tokens = room.leg.prompt_tokens + room.leg.output_tokens_max
        ledger.queue.add(room.key, Need(ledger.setup.layout.pages_for(tokens), slot=True))
