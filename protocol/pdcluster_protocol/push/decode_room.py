"""One request on the decode side, and in which states prefill may write into its pages."""

from __future__ import annotations

import msgspec

from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import InstanceCard
from pdcluster_protocol.push.landing import Landing
from pdcluster_protocol.push.receiver import RECEIVER, ReceiverState
from pdcluster_protocol.rank_mapping import Purpose
from pdcluster_protocol.ranks import Lane

WRITABLE = (ReceiverState.PUBLISHED, ReceiverState.TRANSFERRING, ReceiverState.LANDED)
"""States in which prefill may write into the room's pages."""


class PrefillRank(msgspec.Struct, frozen=True):
    """A prefill rank as one of our ranks sees it."""

    address: RankAddress
    rank: int
    """Its unique rank, by which its messages name it."""
    purpose: Purpose


class DecodeRoom:
    """One request on the decode side."""

    __slots__ = (
        "card",
        "cause",
        "epoch",
        "key",
        "landings",
        "leg",
        "pages",
        "prefill_ranks",
        "repeat_seconds",
        "required_destinations",
        "slot",
        "state",
    )

    def __init__(self, leg: LegArrived) -> None:
        self.leg = leg
        self.key = leg.key
        self.state = RECEIVER.initial
        self.cause = ""
        """Why it failed first; its tombstone says so to those who ask late."""
        self.card: InstanceCard | None = None
        self.prefill_ranks: tuple[tuple[PrefillRank, ...], ...] = ()
        """By our ranks: the prefill ranks that each deals with, all of which get its addresses."""
        self.required_destinations = 1
        """How many of our ranks each of those must hear from."""
        self.pages: tuple[int, ...] = ()
        self.slot = -1
        self.epoch = 0
        self.landings: tuple[Landing, ...] = ()
        """By our ranks; empty until pages are reserved."""
        self.repeat_seconds = 0.0

    @property
    def complete(self) -> bool:
        """Whether every run of every rank has landed in every rank and is verified (order 3)."""
        return bool(self.landings) and all(landing.complete for landing in self.landings)

    @property
    def drained(self) -> bool:
        """False when a prefill rank said that an earlier write ended without proof."""
        return all(landing.drained for landing in self.landings)

    def lanes(self) -> tuple[Lane, ...]:
        """Which of our ranks deals with which of prefill's, dummies included."""
        return tuple(
            Lane(rank, peer.address)
            for rank, peers in enumerate(self.prefill_ranks)
            for peer in peers
        )
