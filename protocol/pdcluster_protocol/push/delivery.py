"""What one prefill rank has to write to one decode rank: to do, on its way, landed.

An operation that ended without success is *lost*, not stopped. It is written again when there is a
new session (the peer's memory was fenced and is mapped anew, or our own transfer process was
replaced), and after a while to the same one. `drained` stays False for a write of which nobody can
say that it has stopped, and `reading` True while it may still read our own pages.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.messages import Run
from pdcluster_protocol.push.destinations import Destination
from pdcluster_protocol.push.routes import Route
from pdcluster_protocol.push.runs import PlannedRun, RunPlanner
from pdcluster_protocol.ranks import Lane


class Delivery(msgspec.Struct, kw_only=True):
    """Mutable state of one destination; owned by its room."""

    lane: Lane
    incarnation: str
    destination: Destination
    route: Route
    pages: tuple[int, ...]
    slot: int
    epoch: int
    planner: RunPlanner | None = None
    outstanding: dict[int, PlannedRun] = {}
    lost: list[PlannedRun] = []
    """Ended without success; they wait for a new session."""
    again: list[PlannedRun] = []
    """To be written again under the present session."""
    announced: list[Run] = []
    repeated: int = 0
    """So many of them were told again in the present round of repeats."""
    fresh: list[Run] = []
    """Landed but not yet announced."""
    metadata_planned: bool = False
    answered: bool = False
    """Decode has heard, by whatever message, that its metadata has arrived."""
    drained: bool = True
    reading: bool = False
    """A write that failed may still read our pages and bring decode whatever they hold then."""
    failure: str = ""
    """What the transport said of the last write that failed."""
    rewrites: int = 0
    """How often what failed was written again to this session."""

    @property
    def landed(self) -> bool:
        """Whether everything has landed, metadata rows included where this rank sends them."""
        return self.kv_landed and (self.metadata_planned or not self.route.sends_metadata)

    def take_fresh(self) -> list[Run]:
        """What is to be announced now."""
        fresh, self.fresh = self.fresh, []
        self.announced += fresh
        return fresh

    def take_repeats(self, most: int) -> list[Run]:
        """What is to be announced again now: everything in turn, so much at a time."""
        start = self.repeated if self.repeated < len(self.announced) else 0
        runs = self.announced[start : start + most]
        self.repeated = start + len(runs)
        return runs

    @property
    def kv_landed(self) -> bool:
        """Whether nothing is under way and every KV run has been; metadata rows come after that."""
        return (
            self.planner is not None
            and self.planner.complete
            and not (self.outstanding or self.lost or self.again)
        )

    def lose_all(self) -> None:
        """Our own transport is gone: what was outstanding may or may not have been written."""
        if self.outstanding:
            self.drained = False
        self.reading = False
        self.lost.extend(self.outstanding.values())
        self.outstanding.clear()

    def fail(self, planned: PlannedRun, detail: str) -> None:
        """A write ended without success: it is lost, not stopped."""
        self.lost.append(planned)
        self.drained, self.reading, self.failure = False, True, detail

    def retarget(self, destination: Destination) -> None:
        """The peer's memory is mapped anew: nothing sent to the old session can land."""
        self.destination = destination
        self.lost.extend(self.outstanding.values())
        self.outstanding.clear()
        self.drained, self.reading = True, False
        self.rewrites = 0
        self.recover()

    def recover(self) -> None:
        """There is a session to write to: what was lost may be written again."""
        self.again.extend(self.lost)
        self.lost.clear()

    def land(self, planned: PlannedRun, digest: int) -> None:
        """A run has landed."""
        self.fresh.append(
            Run(
                index=len(self.announced) + len(self.fresh),
                region=planned.region,
                first_page=planned.first_page,
                pages=planned.pages,
                nbytes=planned.nbytes * planned.pieces,
                digest=digest,
                offset=planned.offset,
                width=planned.width,
            )
        )
