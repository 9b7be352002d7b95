"""The states of a sequence, what moves it, and the reasons that count."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Role
from pdcluster_protocol.table import Table

SYMPTOMS: Final = frozenset(
    {
        Reason.ABORTED,
        Reason.CLIENT_GONE,
        Reason.PEER_FAILED,
        Reason.PEER_DIED,
        Reason.PEER_UNREACHABLE,
    }
)
"""Said by a leg, these point at the other leg."""

RETRYABLE: Final = frozenset(
    {
        Reason.ROOM_IN_USE,
        Reason.ENGINE_DIED,
        Reason.PEER_DIED,
        Reason.PEER_UNREACHABLE,
        Reason.NOT_READY,
        Reason.SHUTTING_DOWN,
    }
)
"""Not the request's fault, and gone with another pair or another room."""


class Dispatch(StrEnum):
    """When the legs are opened."""

    PARALLEL = "parallel"
    SERIAL = "serial"


class PairState(StrEnum):
    """Where a sequence is."""

    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    JUDGING = "judging"
    DONE = "done"
    FAILED = "failed"
    GONE = "gone"


class Trigger(StrEnum):
    """What moves a sequence."""

    CHOOSE = "choose"
    BYTE = "byte"
    ANSWER = "answer"
    SYMPTOM = "symptom"
    RETRY = "retry"
    FAIL = "fail"
    LEAVE = "leave"


TABLE: Final = Table[PairState, Trigger](
    "pair",
    initial=PairState.QUEUED,
    transitions={
        (PairState.QUEUED, Trigger.CHOOSE): PairState.RUNNING,
        (PairState.QUEUED, Trigger.FAIL): PairState.FAILED,
        (PairState.QUEUED, Trigger.LEAVE): PairState.GONE,
        (PairState.RUNNING, Trigger.BYTE): PairState.STREAMING,
        (PairState.RUNNING, Trigger.ANSWER): PairState.DONE,
        (PairState.RUNNING, Trigger.SYMPTOM): PairState.JUDGING,
        (PairState.RUNNING, Trigger.RETRY): PairState.QUEUED,
        (PairState.RUNNING, Trigger.FAIL): PairState.FAILED,
        (PairState.RUNNING, Trigger.LEAVE): PairState.GONE,
        (PairState.STREAMING, Trigger.ANSWER): PairState.DONE,
        (PairState.STREAMING, Trigger.SYMPTOM): PairState.JUDGING,
        (PairState.STREAMING, Trigger.FAIL): PairState.FAILED,
        (PairState.STREAMING, Trigger.LEAVE): PairState.GONE,
        (PairState.JUDGING, Trigger.RETRY): PairState.QUEUED,
        (PairState.JUDGING, Trigger.FAIL): PairState.FAILED,
        (PairState.JUDGING, Trigger.LEAVE): PairState.GONE,
    },
    terminals=(PairState.DONE, PairState.FAILED, PairState.GONE),
)

OPENED_BY: Final[dict[Dispatch, dict[Role | None, tuple[Role, ...]]]] = {
    Dispatch.PARALLEL: {None: (Role.PREFILL, Role.DECODE)},
    Dispatch.SERIAL: {None: (Role.PREFILL,), Role.PREFILL: (Role.DECODE,)},
}
"""The legs that are opened when a pair is chosen (None) and when a leg has answered."""


class LegState(StrEnum):
    """What the router knows of one leg of the present try."""

    CLOSED = "closed"
    OPEN = "open"
    ANSWERED = "answered"
    FAILED = "failed"
    LOST = "lost"
    """Failed as the router saw it: the engine may still be at work, so it is aborted too."""
