"""Requests that one engine computes alone: the oracle, the bench's yardstick, short prompts.

They share pool and queue with the rooms of the PD dialects, so they are bounded and fair with them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pdcluster_protocol.admission import Grant, Need
from pdcluster_protocol.effects import ConcludeLeg, StartAlone, StopCompute
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.table import Table


class AloneState(StrEnum):
    """Where a request without a peer stands."""

    ADMITTING = "Admitting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    FINISHED = "Finished"
    FAILED = "Failed"


class AloneTrigger(StrEnum):
    """What moves it."""

    ADMITTED = "Admitted"
    ANSWERED = "Answered"
    FAULT = "Fault"
    MODEL_STOPPED = "ModelStopped"


_S, _T = AloneState, AloneTrigger

ALONE: Final = Table[AloneState, AloneTrigger](
    "alone",
    initial=_S.ADMITTING,
    terminals=(_S.FINISHED, _S.FAILED),
    transitions={
        (_S.ADMITTING, _T.ADMITTED): _S.RUNNING,
        (_S.ADMITTING, _T.FAULT): _S.FAILED,
        (_S.RUNNING, _T.ANSWERED): _S.FINISHED,
        (_S.RUNNING, _T.FAULT): _S.STOPPING,
        (_S.STOPPING, _T.MODEL_STOPPED): _S.FAILED,
    },
)


class AloneRoom:
    """One request."""

    __slots__ = ("key", "leg", "state")

    def __init__(self, leg: LegArrived) -> None:
        self.leg = leg
        self.key = leg.key
        self.state = ALONE.initial


class AloneRooms:
    """The table of requests without a peer."""

    __slots__ = ("_ledger", "rooms")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.rooms: dict[Key, AloneRoom] = {}

    def leg_arrived(self, leg: LegArrived) -> None:
        """Queue it for pages."""
        ledger = self._ledger
        room = AloneRoom(leg)
        self.rooms[leg.key] = room
        ledger.set_clock(Clock.BOOTSTRAP, room.key, ledger.setup.timeouts.bootstrap_seconds)
        tokens = leg.prompt_tokens + leg.output_tokens_max
        ledger.queue.add(room.key, Need(ledger.setup.layout.pages_for(tokens), slot=False))

    def granted(self, grant: Grant) -> None:
        """Pages are there: compute."""
        room = self.rooms[grant.key]
        self._ledger.stop_clocks(room.key)
        self._ledger.advance(ALONE, room, AloneTrigger.ADMITTED, f"{len(grant.pages)} pages")
        self._ledger.emit(StartAlone(room.key, grant.pages))

    def cancel(self, key: Key, reason: Reason, detail: str) -> bool:
        """The client left, or a clock ran out; whether there is such a request."""
        room = self.rooms.get(key)
        if room is None or room.state is AloneState.STOPPING:
            return room is not None
        ledger = self._ledger
        ledger.queue.remove(key)
        ledger.stop_clocks(key)
        ledger.emit(ConcludeLeg(key, reason, detail))
        ledger.advance(ALONE, room, AloneTrigger.FAULT, f"{reason}: {detail}")
        if room.state is AloneState.FAILED:
            self._close(room)
        else:
            ledger.emit(StopCompute(key))
        return True

    def finished(self, key: Key) -> None:
        """The last token is out."""
        room = self.rooms.get(key)
        if room is None:
            return
        if room.state is AloneState.RUNNING:
            self._ledger.advance(ALONE, room, AloneTrigger.ANSWERED)
            self._ledger.emit(ConcludeLeg(key, None))
            self._close(room)
        else:
            self.stopped(key, None, "")

    def stopped(self, key: Key, reason: Reason | None, detail: str) -> None:
        """The model let go, as asked or by its own failure."""
        room = self.rooms.get(key)
        if room is None:
            return
        if room.state is AloneState.RUNNING:
            self.cancel(key, reason or Reason.MODEL_FAILED, detail)
        if room.state is AloneState.STOPPING:
            self._ledger.advance(ALONE, room, AloneTrigger.MODEL_STOPPED)
            self._close(room)

    def due(self, clock: Clock, key: Key) -> None:
        """A clock ran out."""
        if key in self.rooms and clock is Clock.BOOTSTRAP:
            self.cancel(key, Reason.BOOTSTRAP_TIMEOUT, "waited too long for free pages")

    def _close(self, room: AloneRoom) -> None:
        del self.rooms[room.key]
        self._ledger.stop_clocks(room.key)
        self._ledger.pool.release(room.key)
