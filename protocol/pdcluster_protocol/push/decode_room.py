"""One request on the decode side, and in which states prefill may write into its pages."""

from __future__ import annotations

from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.messages import InstanceCard, RankCard
from pdcluster_protocol.push.landing import Landing
from pdcluster_protocol.push.receiver import RECEIVER, ReceiverState

WRITABLE = (ReceiverState.PUBLISHED, ReceiverState.TRANSFERRING, ReceiverState.LANDED)
"""States in which prefill may write into the room's pages."""


class DecodeRoom:
    """One request on the decode side."""

    __slots__ = (
        "card",
        "cause",
        "epoch",
        "key",
        "landing",
        "leg",
        "pages",
        "ranks",
        "repeat_seconds",
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
        self.ranks: tuple[RankCard, ...] = ()
        """The prefill ranks that serve this request: all of them are given addresses."""
        self.pages: tuple[int, ...] = ()
        self.slot = -1
        self.epoch = 0
        self.landing: Landing | None = None
        self.repeat_seconds = 0.0
