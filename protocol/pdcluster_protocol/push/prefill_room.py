"""One request on the prefill side."""

from __future__ import annotations

from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ids import Key
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.sender import SENDER, SenderState
from pdcluster_protocol.rank_mapping import RankMapping
from pdcluster_protocol.ranks import Lane

ACTIVE = (SenderState.COMPUTING, SenderState.FLUSHING)


class PrefillRoom:
    """One request on the prefill side."""

    __slots__ = (
        "ack_targets",
        "cause",
        "computing",
        "deliveries",
        "key",
        "leg",
        "mapping",
        "pages",
        "repeat_seconds",
        "slot",
        "state",
        "wire_key",
    )

    def __init__(self, leg: LegArrived, repeat_seconds: float) -> None:
        self.leg = leg
        self.key = leg.key
        self.wire_key: Key | None = leg.key if leg.attempt_known else None
        self.state = SENDER.initial
        self.cause = ""
        """Why it failed first; its tombstone says so to those who ask late."""
        self.mapping: RankMapping | None = None
        """How our ranks meet decode's; None until its first metadata."""
        self.deliveries: dict[Lane, Delivery] = {}
        self.pages: tuple[int, ...] = ()
        self.slot = -1
        self.computing = False
        self.repeat_seconds = repeat_seconds
        self.ack_targets: dict[Lane, int | None] = {}

    @property
    def read_by_strays(self) -> bool:
        """Whether writes that failed may still bring our pages to a decode that runs on them.

        Before everything has landed decode cannot run, and its own pages wait for a fence.
        """
        deliveries = self.deliveries.values()
        return any(d.reading for d in deliveries) and all(d.landed for d in deliveries)
