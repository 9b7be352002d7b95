"""Who serves a bootstrap address, and which of its ranks: the first step of a decode room.

The question goes to our own sidecar and is repeated, since that may be restarting. The answer is
the instance's card, already found compatible; from it come the ranks that each of ours deals with,
all of which are given addresses.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.admission import Need
from pdcluster_protocol.effects import ResolvePeer
from pdcluster_protocol.errors import LayoutMismatch, RankConflict, Reason
from pdcluster_protocol.events import PeerResolved
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import WIRE_VERSION_MIN, InstanceCard
from pdcluster_protocol.push.decode_ends import DecodeEnds
from pdcluster_protocol.push.decode_room import DecodeRoom, PrefillRank
from pdcluster_protocol.push.receiver import RECEIVER, ReceiverState, ReceiverTrigger
from pdcluster_protocol.rank_layout import kv_facts
from pdcluster_protocol.rank_mapping import RankMapping
from pdcluster_protocol.topology import RankCoordinate


class Resolution:
    """Finds the prefill ranks of rooms; shares the table of rooms with `DecodeRooms`."""

    __slots__ = ("_cards", "_ends", "_ledger", "_rooms")

    def __init__(self, ledger: Ledger, rooms: dict[int, DecodeRoom], ends: DecodeEnds) -> None:
        self._ledger = ledger
        self._rooms = rooms
        self._ends = ends
        self._cards: dict[RankAddress, tuple[float, InstanceCard]] = {}
        """Answers and until when they may be used again."""

    def ask(self, room: DecodeRoom) -> None:
        """Ask, and ask again when the clock rings: the question may have been lost."""
        assert room.leg.bootstrap is not None
        until, card = self._cards.get(room.leg.bootstrap, (0.0, None))
        if card is not None and self._ledger.now < until:
            self._found(room, card)
            return
        self._ledger.emit(ResolvePeer(room.leg.bootstrap))
        seconds = self._ledger.setup.limits.retransmit_seconds_max
        self._ledger.set_clock(Clock.REPEAT, room.key, seconds)

    def forget(self, incarnation: str) -> None:
        """An instance is gone."""
        for address, (_, card) in list(self._cards.items()):
            if card.incarnation == incarnation:
                del self._cards[address]

    def answered(self, event: PeerResolved) -> None:
        """Who the prefill instance is; every room that asked goes on or ends."""
        self._remember(event)
        for room in list(self._rooms.values()):
            if room.state is not ReceiverState.RESOLVING or room.leg.bootstrap != event.bootstrap:
                continue
            if event.card is None:
                reason = event.reason or Reason.PEER_UNREACHABLE
                self._ends.fail(room, reason, event.detail)
            else:
                self._found(room, event.card)

    def _remember(self, event: PeerResolved) -> None:
        limits = self._ledger.setup.limits
        self._cards.pop(event.bootstrap, None)
        if event.card is None:
            return
        if len(self._cards) >= limits.peers_max:
            del self._cards[next(iter(self._cards))]
        # As long as a ping is away the sidecar would not know better.
        self._cards[event.bootstrap] = (self._ledger.now + limits.ping_seconds, event.card)

    def _found(self, room: DecodeRoom, card: InstanceCard) -> None:
        ledger = self._ledger
        dp_rank = room.leg.prefill_dp_rank
        if dp_rank is None:
            dp_rank = room.key.room % card.parallel.dp
        room.card = card
        if card.wire_max < WIRE_VERSION_MIN:
            # It would write metadata by a table for each buffer, into the slots of others here.
            detail = f"prefill {card.instance} speaks plain SGLang; it announces no run to verify"
            self._ends.fail(room, Reason.WIRE_ERROR, detail)
            return
        try:
            self._map(room, card, dp_rank)
        except (LayoutMismatch, RankConflict) as fault:
            self._ends.fail(room, fault.reason, f"prefill {card.instance}: {fault.detail}")
            return
        ledger.stop_clocks(room.key, (Clock.REPEAT,))
        ledger.advance(RECEIVER, room, ReceiverTrigger.PEER_KNOWN, card.instance)
        tokens = room.leg.prompt_tokens + room.leg.output_tokens_max
        ledger.queue.add(room.key, Need(ledger.setup.layout.pages_for(tokens), slot=True))

    def _map(self, room: DecodeRoom, card: InstanceCard, dp_rank: int) -> None:
        """Which prefill ranks each of ours deals with.

        Raises:
            LayoutMismatch: the sizes exclude each other.
            RankConflict: there is no such data-parallel rank, or the card lacks a rank.
        """
        setup = self._ledger.setup
        mapping = RankMapping(
            card.parallel, setup.parallel, kv_facts(setup.layout, spread=card.spread)
        )
        addresses = {rank.coordinate: rank.address for rank in card.ranks}
        room.required_destinations = mapping.destinations_per_rank
        room.prefill_ranks = tuple(
            tuple(
                PrefillRank(
                    address=_address(addresses, target),
                    rank=target.unique_rank(card.parallel),
                    purpose=mapping.purpose(target),
                )
                for target in mapping.targets(
                    RankCoordinate(tp=place.coordinate.tp, pp=place.coordinate.pp),
                    prefill_dp=dp_rank,
                )
            )
            for place in setup.ranks
        )


def _address(addresses: dict[RankCoordinate, RankAddress], target: RankCoordinate) -> RankAddress:
    address = addresses.get(target)
    if address is None:
        raise RankConflict(f"it has no rank {tuple(msgspec.to_builtins(target))}")
    return address
