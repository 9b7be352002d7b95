"""Effects to actions: the only place where what a node decides touches the world.

An executor retries nothing: deadlines and repetition are the core's. What an action answers at once
(a metadata slot that was read, a request that is not there) becomes a follow-up event, which the
loop hands back to the node after the effects at hand.
"""

from __future__ import annotations

from collections import deque
from typing import assert_never

import structlog

from pdcluster_engine.parts import Parts
from pdcluster_engine.scheduling.orders import Begin, Work
from pdcluster_engine.transport.port import DigestRequest, WriteRequest
from pdcluster_protocol.effects import (
    ClearMetadata,
    ConcludeLeg,
    Count,
    CountBytes,
    Effect,
    Fence,
    ReadMetadata,
    Report,
    ResolvePeer,
    Send,
    StartAlone,
    StartDecode,
    StartPrefill,
    StopCompute,
    VerifyRun,
    Write,
)
from pdcluster_protocol.errors import Reason, TransportError
from pdcluster_protocol.events import ComputeStopped, Event, MetadataRead, OperationDone
from pdcluster_protocol.ids import Key
from pdcluster_protocol.messages import Outbound, Resolve

log = structlog.get_logger()


class Executor:
    """Carries out effects on the owner thread."""

    __slots__ = (
        "_compute",
        "_digests",
        "_legs",
        "_metadata",
        "_ports",
        "_telemetry",
        "followups",
    )

    def __init__(self, parts: Parts, *, digests: bool) -> None:
        self._legs = parts.legs
        self._compute = parts.compute
        self._ports = parts.ports
        self._metadata = parts.metadata
        self._telemetry = parts.telemetry
        self._digests = digests
        """Whether writes answer with a checksum, which decode compares."""
        self.followups: deque[Event] = deque()

    def run(self, effect: Effect) -> None:
        """Carry out one effect."""
        match effect:
            case Send(to, message, rank):
                self._ports[rank].link.send(Outbound(to, message))
            case ResolvePeer(bootstrap):
                self._ports[0].link.send(Resolve(bootstrap.host, bootstrap.port))
            case Write() | VerifyRun() | Fence():
                self._transfer(effect)
            case StartPrefill() | StartDecode() | StartAlone() | StopCompute():
                self._order(effect)
            case Report(key, reason, detail):
                log.critical(
                    "core_fault", room=key.room, attempt=key.attempt, reason=reason, detail=detail
                )
            case ReadMetadata() | ClearMetadata() | ConcludeLeg() | Count() | CountBytes():
                self._settle(effect)
            case _:
                assert_never(effect)

    def _transfer(self, effect: Write | VerifyRun | Fence) -> None:
        match effect:
            case Write():
                self._submit(effect.rank, _write_request(effect, digest=self._digests))
            case VerifyRun(operation, offset, nbytes, rank, pieces, stride):
                self._submit(rank, DigestRequest(operation, offset, nbytes, pieces, stride))
            case Fence(cause, pages):
                log.warning("fence", reason=cause, pages=pages)
                for port in self._ports:
                    port.transport.fence()
            case _:
                assert_never(effect)

    def _submit(self, rank: int, request: WriteRequest | DigestRequest) -> None:
        try:
            self._ports[rank].transport.submit(request)
        except TransportError as error:
            # It never left, which a node may treat like any other write that failed.
            self.followups.append(OperationDone(request.operation, ok=False, detail=error.detail))

    def _order(self, effect: StartPrefill | StartDecode | StartAlone | StopCompute) -> None:
        match effect:
            case StartPrefill(key, pages, slot):
                self._begin(key, Work.PREFILL, pages, slot)
            case StartDecode(key, pages, slot):
                self._begin(key, Work.DECODE, pages, slot)
            case StartAlone(key, pages):
                self._begin(key, Work.ALONE, pages, None)
            case StopCompute(key):
                self._compute.stop(key)
            case _:
                assert_never(effect)

    def _begin(self, key: Key, work: Work, pages: tuple[int, ...], slot: int | None) -> None:
        leg = self._legs.find(key)
        if leg is None:
            self._refuse(key, Reason.ABORTED, "its request has gone")
        elif not self._compute.begin(Begin(key, leg, work, pages, slot)):
            self._refuse(key, Reason.OVERLOADED, "the model thread's line is full")

    def _refuse(self, key: Key, reason: Reason, detail: str) -> None:
        self.followups.append(ComputeStopped(key, reason, detail))

    def _settle(
        self, effect: ReadMetadata | ClearMetadata | ConcludeLeg | Count | CountBytes
    ) -> None:
        match effect:
            case ReadMetadata(key, slot):
                self.followups.append(MetadataRead(key, self._metadata.room(slot)))
            case ClearMetadata(slot):
                self._metadata.clear(slot)
            case ConcludeLeg(key, reason, detail):
                self._conclude(key, reason, detail)
            case Count(what):
                self._telemetry.dropped.labels(what).inc()
            case CountBytes(kind, nbytes):
                self._telemetry.count_bytes(kind, nbytes)
            case _:
                assert_never(effect)

    def _conclude(self, key: Key, reason: Reason | None, detail: str) -> None:
        leg = self._legs.remove(key)
        if leg is None:
            self._telemetry.dropped.labels("conclusion_without_leg").inc()
            return
        leg.end(reason, detail)
        log.info(
            "concluded",
            rid=leg.submission.rid,
            room=key.room,
            attempt=key.attempt,
            leg=leg.submission.leg,
            reason="" if reason is None else str(reason),
            detail=detail,
        )


def _write_request(write: Write, *, digest: bool) -> WriteRequest:
    return WriteRequest(
        write.operation,
        write.target,
        write.source_offset,
        write.destination_address,
        write.nbytes,
        digest,
        write.pieces,
        write.source_stride,
        write.destination_stride,
    )
