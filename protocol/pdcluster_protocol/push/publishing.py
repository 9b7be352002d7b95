"""Decode's page numbers on their way to prefill: registration once per session, metadata per room.

Each of our ranks tells the prefill ranks that it deals with. A dummy among those is told of an
empty list of pages, as SGLang's senders expect it.

Both are repeated until prefill answers, and slowly after that: the repetition is a keep-alive that
prefill answers with `Accepted` as long as it knows the key.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import RegisterKVArgs, TransferMetadata
from pdcluster_protocol.push.decode_room import DecodeRoom
from pdcluster_protocol.push.destinations import is_state, register_kv_args
from pdcluster_protocol.push.pairing import page_bytes
from pdcluster_protocol.rank_mapping import Purpose
from pdcluster_protocol.ranks import Lane, OwnRank


class Publishing:
    """What our decode ranks have told to whom under their present transport sessions."""

    __slots__ = ("_ledger", "_registered")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._registered: set[tuple[Lane, str]] = set()

    def forget_session(self) -> None:
        """Our memory is mapped anew: every peer must hear the new addresses."""
        self._registered.clear()

    def publish(self, room: DecodeRoom) -> None:
        """Send the page numbers of a room to every rank that serves it."""
        room.repeat_seconds = self._ledger.setup.limits.retransmit_seconds_min
        self._send(room, register_again=False)

    def repeat(self, room: DecodeRoom) -> None:
        """Send them again; the registration too, since it may have been what was lost."""
        self._send(room, register_again=True)

    def _send(self, room: DecodeRoom, *, register_again: bool) -> None:
        ledger = self._ledger
        ledger.set_clock(Clock.REPEAT, room.key, room.repeat_seconds)
        limit = ledger.setup.limits.retransmit_seconds_max
        room.repeat_seconds = min(room.repeat_seconds * 2, limit)
        if not ledger.ready or ledger.fencing or not room.landings:
            # Addresses of a rank whose memory is about to be mapped anew must not get about.
            return
        incarnation = room.card.incarnation if room.card else ""
        for own, peers in zip(ledger.ranks, room.prefill_ranks, strict=True):
            if own.address is None or own.session is None:
                continue
            message = self._metadata(room, own, own.session, own.address)
            for peer in peers:
                lane = Lane(own.index, peer.address)
                if register_again or (lane, incarnation) not in self._registered:
                    self._register(lane, own, own.session, own.address)
                    self._remember((lane, incarnation))
                dummy = peer.purpose is not Purpose.REAL
                ledger.send(lane, _as_dummy(message) if dummy else message)

    def _remember(self, name: tuple[Lane, str]) -> None:
        # Every restart of a prefill instance adds a name; telling a peer twice costs one message.
        known = self._registered
        if name not in known and len(known) >= self._ledger.setup.limits.peers_max:
            known.clear()
        known.add(name)

    def _metadata(
        self,
        room: DecodeRoom,
        own: OwnRank,
        session: str,
        reply_to: RankAddress,
    ) -> TransferMetadata:
        pages = room.landings[own.index].prompt_pages
        has_state = any(is_state(region.kind) for region in own.place.layout.regions)
        return TransferMetadata(
            key=room.key,
            reply_to=reply_to,
            session=session,
            pages=page_bytes(pages),
            aux_index=room.slot,
            required_destinations=room.required_destinations,
            state_indices=(pages,) if has_state else (),
            prompt_tokens=room.leg.prompt_tokens,
            prompt_digest=room.leg.prompt_digest,
            epoch=room.epoch,
            mapping=own.mapping,
        )

    def _register(self, lane: Lane, own: OwnRank, session: str, reply_to: RankAddress) -> None:
        setup, coordinate = self._ledger.setup, own.place.coordinate
        self._ledger.send(
            lane,
            register_kv_args(
                own.place.layout,
                base_address=own.base_address,
                page_count=setup.page_count,
                slot_count=setup.slot_count,
                metadata=own.place.metadata,
                template=RegisterKVArgs(
                    reply_to=reply_to,
                    session=session,
                    kv_pointers=(),
                    aux_pointers=(),
                    kv_item_lengths=(),
                    decode_tp_rank=coordinate.tp,
                    decode_tp_size=setup.parallel.attention_tp,
                    decode_pp_rank=coordinate.pp,
                    decode_pp_size=setup.parallel.pp,
                    mapping=own.mapping,
                ),
            ),
        )


def _as_dummy(message: TransferMetadata) -> TransferMetadata:
    return msgspec.structs.replace(message, pages=b"", aux_index=None, state_indices=(), dummy=True)
