"""How a leg and decode's metadata find each other, and whether they belong together.

Of each decode rank the newest registration is kept, whichever of our ranks it was sent to, and
metadata is taken only together with the registration it was sent with: messages overtake each
other, and a restarted decode may have its old name and port but other memory. Metadata that comes
before its leg waits in a bounded table that forgets by a deadline of its own: a network message
never makes a room. What does not fit together (layout, token ids, page numbers outside the
registered memory) is a `Refusal`, found before the first byte is written.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import LayoutMismatch, RankConflict, Reason
from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import RegisterKVArgs, TransferMetadata
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.destinations import Destination, require_destination
from pdcluster_protocol.push.routes import Routes
from pdcluster_protocol.rank_mapping import Purpose
from pdcluster_protocol.ranks import Lane

BYTES_PER_PAGE_NUMBER = 4


class Refusal(msgspec.Struct, frozen=True):
    """Why leg and metadata do not belong together."""

    __match_args__ = ("reason", "detail")

    reason: Reason
    detail: str


class Arrived(msgspec.Struct, frozen=True):
    """Metadata, by which way it came and from which instance."""

    lane: Lane
    metadata: TransferMetadata
    incarnation: str


class Registered(msgspec.Struct, frozen=True):
    """The newest registration of one decode rank."""

    session: str
    mapping: int
    destination: Destination | LayoutMismatch


class Pairing:
    """Registrations and early metadata of one prefill node."""

    __slots__ = ("_early", "_ledger", "_registered", "routes")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.routes = Routes(ledger.setup)
        self._registered: dict[tuple[str, RankAddress], Registered] = {}
        self._early: dict[Key, dict[Lane, Arrived]] = {}

    @property
    def early_count(self) -> int:
        """Keys whose metadata waits for a leg."""
        return len(self._early)

    def register(self, args: RegisterKVArgs, incarnation: str) -> None:
        """Keep where a decode rank's memory lies, unless a later registration came before."""
        setup = self._ledger.setup
        name = (incarnation, args.reply_to)
        known = self._registered.get(name)
        if known is not None and known.mapping > args.mapping:
            self._ledger.count("registration_stale")
            return
        if known is None and len(self._registered) >= setup.limits.peers_max:
            self._registered.pop(next(iter(self._registered)))
        destination: Destination | LayoutMismatch
        try:
            destination = require_destination(
                self.routes,
                metadata_rows=setup.ranks[0].metadata.rows,
                args=args,
                incarnation=incarnation,
            )
        except LayoutMismatch as mismatch:
            destination = mismatch
        self._registered[name] = Registered(args.session, args.mapping, destination)
        self._tell_sessions()

    def destination(
        self, metadata: TransferMetadata, incarnation: str
    ) -> Destination | LayoutMismatch | None:
        """The memory that the metadata speaks of; None when another or none is registered."""
        known = self._registered.get((incarnation, metadata.reply_to))
        if known is None or known.mapping != metadata.mapping or known.session != metadata.session:
            return None
        return known.destination

    def wait(self, arrived: Arrived) -> bool:
        """Keep metadata until its leg comes; False when the table is full."""
        ledger, metadata = self._ledger, arrived.metadata
        waiting = self._early.get(metadata.key)
        if waiting is None:
            if len(self._early) >= ledger.setup.limits.waiting_rooms_max:
                ledger.count("metadata_overflow")
                return False
            waiting = self._early[metadata.key] = {}
            ledger.set_clock(Clock.EARLY, metadata.key, ledger.setup.timeouts.bootstrap_seconds)
        if len(waiting) >= ledger.setup.limits.peers_max:
            ledger.count("metadata_overflow")
            return False
        waiting[arrived.lane] = arrived
        return True

    def take(self, key: Key, *, attempt_known: bool) -> list[Arrived]:
        """The metadata that waited for this leg; without an attempt, of any attempt of its room."""
        if attempt_known:
            keys = [key] if key in self._early else []
        else:
            keys = [waiting for waiting in self._early if waiting.room == key.room]
        taken: list[Arrived] = []
        for found in keys:
            self._ledger.stop_clocks(found, (Clock.EARLY,))
            taken += self._early.pop(found).values()
        return taken

    def waiting_keys(self) -> tuple[Key, ...]:
        """Keys whose metadata waits."""
        return tuple(self._early)

    def forget(self, key: Key) -> bool:
        """Drop what waits under a key; whether there was something."""
        self._ledger.stop_clocks(key, (Clock.EARLY,))
        return self._early.pop(key, None) is not None

    def forget_incarnation(self, incarnation: str) -> None:
        """A decode instance is gone: its registrations and metadata go too."""
        for name in [name for name in self._registered if name[0] == incarnation]:
            del self._registered[name]
        self._tell_sessions()
        for key, waiting in list(self._early.items()):
            if any(arrived.incarnation == incarnation for arrived in waiting.values()):
                self.forget(key)

    def _tell_sessions(self) -> None:
        sessions = {registered.session for registered in self._registered.values()}
        self._ledger.contacts.remain(sessions)

    def match(
        self, leg: LegArrived, arrived: Arrived, destination: Destination | LayoutMismatch
    ) -> Delivery | Refusal | None:
        """A delivery to where the metadata says, or why there can be none; None for a dummy."""
        metadata = arrived.metadata
        if isinstance(destination, LayoutMismatch):
            return Refusal(Reason.LAYOUT_MISMATCH, destination.detail)
        theirs = (metadata.prompt_tokens, metadata.prompt_digest)
        if metadata.prompt_digest and theirs != (leg.prompt_tokens, leg.prompt_digest):
            return Refusal(
                Reason.TOKEN_MISMATCH,
                f"prefill has {leg.prompt_tokens} tokens with digest {leg.prompt_digest},"
                f" decode {metadata.prompt_tokens} with {metadata.prompt_digest}",
            )
        try:
            route = self.routes.route(
                destination.rank_mapping, arrived.lane.rank, destination.coordinate
            )
        except RankConflict as conflict:
            return Refusal(Reason.RANK_CONFLICT, conflict.detail)
        if route.purpose is not Purpose.REAL:
            return None
        pages = page_numbers(metadata)
        expected = self._ledger.setup.layout.pages_for(leg.prompt_tokens)
        if not pages or len(pages) != expected or len(set(pages)) != expected:
            return Refusal(Reason.WIRE_ERROR, f"not {expected} different pages for the prompt")
        slot = metadata.aux_index if metadata.aux_index is not None else -1
        if not _inside(destination, pages, slot):
            return Refusal(Reason.WIRE_ERROR, "pages or slot outside decode's registered memory")
        return Delivery(
            lane=arrived.lane,
            incarnation=arrived.incarnation,
            destination=destination,
            route=route,
            pages=pages,
            slot=slot,
            epoch=metadata.epoch,
        )


def page_numbers(metadata: TransferMetadata) -> tuple[int, ...] | None:
    """The page numbers in a metadata message; None when the bytes are no whole numbers."""
    if len(metadata.pages) % BYTES_PER_PAGE_NUMBER:
        return None
    view = memoryview(metadata.pages)
    return tuple(
        int.from_bytes(view[i : i + BYTES_PER_PAGE_NUMBER], "little", signed=True)
        for i in range(0, len(view), BYTES_PER_PAGE_NUMBER)
    )


def page_bytes(pages: tuple[int, ...]) -> bytes:
    """Page numbers as int32 little-endian, as in SGLang's metadata frame."""
    return b"".join(page.to_bytes(BYTES_PER_PAGE_NUMBER, "little", signed=True) for page in pages)


def _inside(destination: Destination, pages: tuple[int, ...], slot: int) -> bool:
    # A plain SGLang peer announces no sizes; its own registration at the transport is the bound.
    page_end = destination.page_count or max(pages) + 1
    slot_end = destination.slot_count or slot + 1
    return 0 <= slot < slot_end and min(pages) >= 0 and max(pages) < page_end
