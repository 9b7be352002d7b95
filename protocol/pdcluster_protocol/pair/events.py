"""What a `Pair` is told (past tense) and what it asks for (imperative)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, Role


class Witness(StrEnum):
    """Who says that a leg failed."""

    LEG = "leg"
    ROUTER = "router"


class PairClocks(msgspec.Struct, frozen=True, kw_only=True):
    """The deadlines of one sequence, in seconds; see the module."""

    queue_seconds: float
    answer_seconds: float
    stall_seconds: float
    grace_seconds: float = 0.15


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a sequence ended without an answer."""

    reason: Reason
    detail: str
    role: Role | None = None
    """The leg that failed; None: no leg was at fault."""
    status: int = 500
    """The HTTP status for the client."""


# --- events -------------------------------------------------------------------------------------


class PairChosen(msgspec.Struct, frozen=True):
    """A pair was found for this try; the key is new."""

    key: Key
    prefill: str
    """The incarnation that serves the leg, as in `decode`."""
    decode: str


class NoPairChosen(msgspec.Struct, frozen=True):
    """The queue gives up on this sequence."""

    reason: Reason
    detail: str


class LegAnswered(msgspec.Struct, frozen=True):
    """A leg ended properly: prefill said that it is done, or decode's answer is whole."""

    key: Key
    role: Role


class LegFailed(msgspec.Struct, frozen=True):
    """A leg ended otherwise."""

    key: Key
    role: Role
    reason: Reason
    detail: str
    witness: Witness = Witness.LEG
    status: int | None = None
    """What the leg answered; None: the usual one of the reason."""


class FirstByte(msgspec.Struct, frozen=True):
    """The first event of decode's stream is here, and will reach the client if `relays` says so."""

    key: Key


class ClientGone(msgspec.Struct, frozen=True):
    """Nobody waits for the answer any more."""

    detail: str = "the client closed its connection"
    reason: Reason = Reason.CLIENT_GONE
    """What the legs are told; another one where not the client, but the router ends it."""


class PeerDead(msgspec.Struct, frozen=True):
    """An incarnation is gone for good."""

    incarnation: str
    detail: str = ""


class PeerSilent(msgspec.Struct, frozen=True):
    """An instance has said nothing for so long that only progress can save its rooms."""

    incarnation: str


class PeerHeard(msgspec.Struct, frozen=True):
    """The instance speaks again: its rooms have their usual clocks back."""

    incarnation: str


class Tick(msgspec.Struct, frozen=True):
    """The deadline came due."""


Event = (
    PairChosen
    | NoPairChosen
    | LegAnswered
    | LegFailed
    | FirstByte
    | ClientGone
    | PeerDead
    | PeerSilent
    | PeerHeard
    | Tick
)


# --- effects ------------------------------------------------------------------------------------


class OpenLeg(msgspec.Struct, frozen=True):
    """Send the leg."""

    key: Key
    role: Role


class AbortLeg(msgspec.Struct, frozen=True):
    """Tell the leg's sidecar to end exactly this key; do not wait for it."""

    key: Key
    role: Role
    reason: Reason


class Retry(msgspec.Struct, frozen=True):
    """Choose another pair under a new key: answered by `PairChosen` or `NoPairChosen`."""

    cause: Cause


class Answer(msgspec.Struct, frozen=True):
    """The one end of the sequence; None: decode's answer is the answer."""

    cause: Cause | None


Effect = OpenLeg | AbortLeg | Retry | Answer
