"""Errors and the vocabulary of reasons.

    PDClusterError                  .reason  .detail  .key
    ├── ConfigError                 flags, files, spec: exit 2
    ├── LocalProtocolError          we broke the rules
    │   ├── IllegalTransition       carries the story
    │   └── InvariantViolated
    ├── RemoteProtocolError         the peer broke the rules: fail the key, keep the process
    │   ├── WireError               undecodable, too large, unknown version      HTTP 400
    │   ├── LayoutMismatch          page size, dtype, layout, hash               HTTP 409
    │   ├── PolicyMismatch          early against prefill_complete               HTTP 409
    │   └── RankConflict            room % dp != rank                            HTTP 409
    ├── Unauthorized                no MAC, a wrong one, a replay                HTTP 401
    ├── InvalidRequest              the client's request names field, value, fix HTTP 400
    ├── NotReady                    not all ranks registered                     HTTP 503
    ├── Overloaded                  a bounded queue is full                      HTTP 429
    ├── TransportError              engine only: a transfer call failed
    └── RequestFailed               the end of one request, with its reason

`Reason` is the one vocabulary: the same word is in the HTTP body, the log, the metric label and the
Kubernetes condition.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdcluster_protocol.ids import Key


class Reason(StrEnum):
    """Why something ended or was refused."""

    # ends of requests
    ABORTED = "Aborted"
    CLIENT_GONE = "ClientGone"
    QUEUE_TIMEOUT = "QueueTimeout"
    BOOTSTRAP_TIMEOUT = "BootstrapTimeout"
    WAITING_TIMEOUT = "WaitingTimeout"
    STALLED = "Stalled"
    PEER_DIED = "PeerDied"
    PEER_UNREACHABLE = "PeerUnreachable"
    PEER_FAILED = "PeerFailed"
    ENGINE_DIED = "EngineDied"
    TRANSFER_FAILED = "TransferFailed"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    TOKEN_MISMATCH = "TokenMismatch"
    METADATA_CORRUPT = "MetadataCorrupt"
    LEASE_EXPIRED = "LeaseExpired"
    MODEL_FAILED = "ModelFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    SHUTTING_DOWN = "ShuttingDown"
    # refusals
    INVALID_REQUEST = "InvalidRequest"
    TOO_LARGE = "TooLarge"
    MODEL_NOT_FOUND = "ModelNotFound"
    UNSUPPORTED = "Unsupported"
    ROOM_IN_USE = "RoomInUse"
    RID_IN_USE = "RidInUse"
    STALE_ATTEMPT = "StaleAttempt"
    RANK_CONFLICT = "RankConflict"
    LAYOUT_MISMATCH = "LayoutMismatch"
    POLICY_MISMATCH = "PolicyMismatch"
    FINGERPRINT_MISMATCH = "FingerprintMismatch"
    UNAUTHORIZED = "Unauthorized"
    WIRE_ERROR = "WireError"
    NOT_READY = "NotReady"
    NO_PAIR = "NoPair"
    OVERLOADED = "Overloaded"
    # start-up and programming
    CONFIG_ERROR = "ConfigError"
    ILLEGAL_TRANSITION = "IllegalTransition"
    INVARIANT_VIOLATED = "InvariantViolated"


HTTP_STATUS: dict[Reason, int] = {
    Reason.INVALID_REQUEST: 400,
    Reason.TOO_LARGE: 400,
    Reason.UNSUPPORTED: 400,
    Reason.WIRE_ERROR: 400,
    Reason.RID_IN_USE: 400,
    Reason.STALE_ATTEMPT: 400,
    Reason.UNAUTHORIZED: 401,
    Reason.MODEL_NOT_FOUND: 404,
    Reason.LAYOUT_MISMATCH: 409,
    Reason.POLICY_MISMATCH: 409,
    Reason.FINGERPRINT_MISMATCH: 409,
    Reason.RANK_CONFLICT: 409,
    Reason.OVERLOADED: 429,
    Reason.CLIENT_GONE: 499,
    Reason.NOT_READY: 503,
    Reason.NO_PAIR: 503,
    Reason.ROOM_IN_USE: 503,
    Reason.SHUTTING_DOWN: 503,
    Reason.PEER_DIED: 502,
    Reason.PEER_UNREACHABLE: 502,
    Reason.ENGINE_DIED: 502,
    Reason.QUEUE_TIMEOUT: 504,
    Reason.BOOTSTRAP_TIMEOUT: 504,
    Reason.WAITING_TIMEOUT: 504,
    Reason.STALLED: 504,
    Reason.DEADLINE_EXCEEDED: 504,
}
"""The HTTP status of each reason; what is not listed is 500."""


def parse_reason(word: str) -> Reason:
    """A peer's word for a reason; what is no reason of ours is `PeerFailed`."""
    try:
        return Reason(word)
    except ValueError:
        return Reason.PEER_FAILED


class PDClusterError(Exception):
    """The root: every error has a reason and a detail that names field, value and fix."""

    reason: Reason = Reason.INVARIANT_VIOLATED

    def __init__(
        self, detail: str, *, reason: Reason | None = None, key: Key | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.key = key
        if reason is not None:
            self.reason = reason

    @property
    def http_status(self) -> int:
        """The status that a server answers with."""
        return HTTP_STATUS.get(self.reason, 500)


class ConfigError(PDClusterError):
    """A flag, a file or a spec is wrong; the process exits with 2."""

    reason = Reason.CONFIG_ERROR


class LocalProtocolError(PDClusterError):
    """We broke our own rules."""


class IllegalTransition(LocalProtocolError):
    """A machine was asked for a transition that its table does not have."""

    reason = Reason.ILLEGAL_TRANSITION


class InvariantViolated(LocalProtocolError):
    """`invariants.check` found a state that must not exist."""


class RemoteProtocolError(PDClusterError):
    """The peer broke the rules; the key fails, the process goes on."""

    reason = Reason.WIRE_ERROR


class WireError(RemoteProtocolError):
    """Bytes that cannot be decoded, are too large or of an unknown version."""


class LayoutMismatch(RemoteProtocolError):
    """Two sides that would give the same bytes different meanings."""

    reason = Reason.LAYOUT_MISMATCH


class PolicyMismatch(RemoteProtocolError):
    """One side admits early, the other after prefill is complete."""

    reason = Reason.POLICY_MISMATCH


class RankConflict(RemoteProtocolError):
    """A rank, or a room's rank, contradicts what is known."""

    reason = Reason.RANK_CONFLICT


class Unauthorized(PDClusterError):
    """No MAC where one is needed, a wrong one, or a replayed one."""

    reason = Reason.UNAUTHORIZED


class InvalidRequest(PDClusterError):
    """The client's request is wrong; `field` names where, the detail says what to do."""

    reason = Reason.INVALID_REQUEST

    def __init__(
        self,
        detail: str,
        *,
        field: str | None = None,
        reason: Reason | None = None,
        key: Key | None = None,
    ) -> None:
        super().__init__(detail, reason=reason, key=key)
        self.field = field


class NotReady(PDClusterError):
    """Not every rank is registered yet."""

    reason = Reason.NOT_READY


class Overloaded(PDClusterError):
    """A bounded queue is full; try again later."""

    reason = Reason.OVERLOADED


class TransportError(PDClusterError):
    """A transfer call failed, or the transport cannot start."""

    reason = Reason.TRANSFER_FAILED


class RequestFailed(PDClusterError):
    """The end of one request that did not succeed."""

    reason = Reason.PEER_FAILED
