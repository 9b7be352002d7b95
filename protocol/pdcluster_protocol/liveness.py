"""Liveness of one peer instance: Alive, Unknown, Dead. Only Dead ends rooms.

An incarnation is *alive* while its sidecar pings and the loop counters of all its ranks move. It is
*unknown* when either stops: nothing new goes there, running rooms keep their own clocks. It is
*dead* when somebody who knows says so (its sidecar saw the engine's link close, or answers with
another incarnation), or when nobody there has spoken for `dead_after_seconds` since it became
unknown. An engine that hangs under a sidecar that still speaks stays unknown: its rooms end by
stall, since nothing proves that it has stopped.

Dead is final for an incarnation that was *declared* dead; one that merely fell silent may be met
again through a new hello, which makes a new `PeerNode`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import PeerChanged, PeerState
from pdcluster_protocol.sidecar_messages import Ping


class Sign(StrEnum):
    """What was learned about a peer."""

    PROGRESSED = "progressed"
    """A ping came, and every rank's loop counter had moved in time."""
    STALLED = "stalled"
    """No such ping for `unknown_after_seconds`."""
    SILENT = "silent"
    """Unknown, and no word from its sidecar, for `dead_after_seconds`."""
    DECLARED = "declared"
    """Its own sidecar said that it died, or speaks for another incarnation now."""


TRANSITIONS: Final[dict[tuple[PeerState, Sign], PeerState]] = {
    (PeerState.ALIVE, Sign.PROGRESSED): PeerState.ALIVE,
    (PeerState.ALIVE, Sign.STALLED): PeerState.UNKNOWN,
    (PeerState.ALIVE, Sign.DECLARED): PeerState.DEAD,
    (PeerState.UNKNOWN, Sign.PROGRESSED): PeerState.ALIVE,
    (PeerState.UNKNOWN, Sign.STALLED): PeerState.UNKNOWN,
    (PeerState.UNKNOWN, Sign.SILENT): PeerState.DEAD,
    (PeerState.UNKNOWN, Sign.DECLARED): PeerState.DEAD,
}
"""Whatever is not in the table changes nothing; `DEAD` has no way out."""


class PeerNode:
    """One incarnation of one peer; every method gives the change to tell the own ranks, if any."""

    __slots__ = (
        "_counters",
        "_heard_at",
        "_incarnation",
        "_limits",
        "_moved_at",
        "_unknown_since",
        "detail",
        "state",
    )

    def __init__(self, incarnation: str, limits: Limits, *, now: float) -> None:
        """A peer is met through its hello, so it starts alive."""
        self.state = PeerState.ALIVE
        self.detail = ""
        self._limits = limits
        self._counters: tuple[tuple[int, float], ...] = ()
        self._moved_at = now
        self._heard_at = now
        self._unknown_since = now
        self._incarnation: Final = incarnation

    @property
    def heard_at(self) -> float:
        """When its sidecar last spoke."""
        return self._heard_at

    def heard(self, now: float) -> None:
        """Its sidecar spoke, which says nothing of its engine."""
        self._heard_at = max(self._heard_at, now)

    def pinged(self, ping: Ping, now: float) -> PeerChanged | None:
        """A ping of this incarnation, with the loop counters of its ranks."""
        if self.state is PeerState.DEAD:
            return None
        self.heard(now)
        known = self._counters if len(self._counters) == len(ping.loops) else ()
        if known:
            self._counters = tuple(
                (loops, moved_at if loops == seen else now)
                for loops, (seen, moved_at) in zip(ping.loops, known, strict=True)
            )
        else:
            self._counters = tuple((loops, now) for loops in ping.loops)
        self._moved_at = min((moved_at for _, moved_at in self._counters), default=self._moved_at)
        if self._moved_at + self._limits.unknown_after_seconds > now:
            return self._advance(Sign.PROGRESSED, "", now)
        return self.tick(now)

    def declared_dead(self, detail: str, now: float) -> PeerChanged | None:
        """Its sidecar said so, or speaks for another incarnation."""
        return self._advance(Sign.DECLARED, detail, now)

    def tick(self, now: float) -> PeerChanged | None:
        """A deadline came due."""
        limits = self._limits
        if self.state is PeerState.ALIVE:
            if now < self._moved_at + limits.unknown_after_seconds:
                return None
            silent = now >= self._heard_at + limits.unknown_after_seconds
            what = "its sidecar is silent" if silent else "its engine's loop stands still"
            return self._advance(
                Sign.STALLED, f"{what} for {limits.unknown_after_seconds:g} s", now
            )
        due = self.deadline()
        if due is not None and now >= due:
            return self._advance(
                Sign.SILENT, f"no word of it for {limits.dead_after_seconds:g} s", now
            )
        return None

    def deadline(self) -> float | None:
        """Latest time for the next `tick`."""
        match self.state:
            case PeerState.ALIVE:
                return self._moved_at + self._limits.unknown_after_seconds
            case PeerState.UNKNOWN:
                since = max(self._unknown_since, self._heard_at)
                return since + self._limits.dead_after_seconds
            case PeerState.DEAD:
                return None

    def _advance(self, sign: Sign, detail: str, now: float) -> PeerChanged | None:
        after = TRANSITIONS.get((self.state, sign), self.state)
        if after is self.state:
            return None
        self.state, self.detail = after, detail
        if after is PeerState.UNKNOWN:
            self._unknown_since = now
        return PeerChanged(self._incarnation, after, detail)
