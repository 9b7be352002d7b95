"""Decode's page numbers on their way to prefill: registration once per session, metadata per room.

Both are repeated until prefill answers, and slowly after that: the repetition is a keep-alive that
prefill answers with `Accepted` as long as it knows the key.
"""

from __future__ import annotations

from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import RankCard, RegisterKVArgs, TransferMetadata
from pdcluster_protocol.push.decode_room import DecodeRoom
from pdcluster_protocol.push.destinations import is_state, register_kv_args
from pdcluster_protocol.push.pairing import page_bytes


class Publishing:
    """What this decode rank has told to whom under its present transport session."""

    __slots__ = ("_ledger", "_registered")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._registered: set[tuple[RankAddress, str]] = set()

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
        if ledger.session is None or ledger.address is None or room.landing is None:
            return
        incarnation = room.card.incarnation if room.card else ""
        message = self._metadata(room, ledger.session, ledger.address)
        for rank in room.ranks:
            name = (rank.address, incarnation)
            if register_again or name not in self._registered:
                self._register(rank, ledger.session, ledger.address)
                self._remember(name)
            ledger.send(rank.address, message)

    def _remember(self, name: tuple[RankAddress, str]) -> None:
        # Every restart of a prefill instance adds a name; telling a peer twice costs one message.
        known = self._registered
        if name not in known and len(known) >= self._ledger.setup.limits.peers_max:
            known.clear()
        known.add(name)

    def _metadata(self, room: DecodeRoom, session: str, reply_to: RankAddress) -> TransferMetadata:
        assert room.landing is not None
        layout = self._ledger.setup.layout
        pages = room.landing.prompt_pages
        has_state = any(is_state(region.kind) for region in layout.regions)
        return TransferMetadata(
            key=room.key,
            reply_to=reply_to,
            session=session,
            pages=page_bytes(pages),
            aux_index=room.slot,
            state_indices=(pages,) if has_state else (),
            prompt_tokens=room.leg.prompt_tokens,
            prompt_digest=room.leg.prompt_digest,
            epoch=room.epoch,
            mapping=self._ledger.mapping,
        )

    def _register(self, rank: RankCard, session: str, reply_to: RankAddress) -> None:
        setup = self._ledger.setup
        self._ledger.send(
            rank.address,
            register_kv_args(
                setup.layout,
                base_address=self._ledger.base_address,
                page_count=setup.page_count,
                slot_count=setup.slot_count,
                metadata_buffers=setup.metadata_buffers,
                template=RegisterKVArgs(
                    reply_to=reply_to,
                    session=session,
                    kv_pointers=(),
                    aux_pointers=(),
                    kv_item_lengths=(),
                    decode_tp_rank=setup.coordinate.tp,
                    decode_tp_size=setup.parallel.attention_tp,
                    mapping=self._ledger.mapping,
                ),
            ),
        )
