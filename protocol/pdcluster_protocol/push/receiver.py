"""The decode side of one request: its states, their table, and what KVPoll says of them.

    RESOLVING     who is the prefill instance at this bootstrap address?
    ADMITTING     the peer is known and compatible; waiting for pages and a metadata slot
    PUBLISHED     pages are reserved and locked, their numbers are sent (orders 1 and 2)
    TRANSFERRING  prefill has shown a sign of life for this key
    LANDED        every run of every rank is verified, coverage is complete; reading the room echo
    RUNNING       the model decodes; nobody else touches the pages (order 3 was kept)
    STOPPING      ended while the model ran; waiting for it to let go
    DRAINING      ended while prefill might write; pages are quarantined until proof (order 4)
    FINISHED      ended well
    FAILED        ended badly, pages are back

This file knows neither addresses nor messages; `decode_rooms` fires the triggers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pdcluster_protocol.messages import KVPoll
from pdcluster_protocol.table import Table


class ReceiverState(StrEnum):
    """Where a decode room stands."""

    RESOLVING = "Resolving"
    ADMITTING = "Admitting"
    PUBLISHED = "Published"
    TRANSFERRING = "Transferring"
    LANDED = "Landed"
    RUNNING = "Running"
    STOPPING = "Stopping"
    DRAINING = "Draining"
    FINISHED = "Finished"
    FAILED = "Failed"


class ReceiverTrigger(StrEnum):
    """What moves a decode room."""

    PEER_KNOWN = "PeerKnown"
    ADMITTED = "Admitted"
    PREFILL_ALIVE = "PrefillAlive"
    ALL_VERIFIED = "AllVerified"
    ROOM_ECHOED = "RoomEchoed"
    ANSWERED = "Answered"
    FAULT = "Fault"
    MODEL_STOPPED = "ModelStopped"
    PROVEN = "Proven"


_S, _T = ReceiverState, ReceiverTrigger

RECEIVER: Final = Table[ReceiverState, ReceiverTrigger](
    "receiver",
    initial=_S.RESOLVING,
    terminals=(_S.FINISHED, _S.FAILED),
    transitions={
        (_S.RESOLVING, _T.PEER_KNOWN): _S.ADMITTING,
        (_S.RESOLVING, _T.FAULT): _S.FAILED,
        (_S.ADMITTING, _T.ADMITTED): _S.PUBLISHED,
        (_S.ADMITTING, _T.FAULT): _S.FAILED,
        (_S.PUBLISHED, _T.PREFILL_ALIVE): _S.TRANSFERRING,
        (_S.PUBLISHED, _T.FAULT): _S.DRAINING,
        (_S.TRANSFERRING, _T.ALL_VERIFIED): _S.LANDED,
        (_S.TRANSFERRING, _T.FAULT): _S.DRAINING,
        (_S.LANDED, _T.ROOM_ECHOED): _S.RUNNING,
        (_S.LANDED, _T.FAULT): _S.DRAINING,
        (_S.RUNNING, _T.ANSWERED): _S.FINISHED,
        (_S.RUNNING, _T.FAULT): _S.STOPPING,
        (_S.STOPPING, _T.MODEL_STOPPED): _S.FAILED,
        (_S.DRAINING, _T.PROVEN): _S.FAILED,
    },
)

KVPOLL: Final[dict[ReceiverState, KVPoll]] = {
    _S.RESOLVING: KVPoll.BOOTSTRAPPING,
    _S.ADMITTING: KVPoll.BOOTSTRAPPING,
    _S.PUBLISHED: KVPoll.WAITING_FOR_INPUT,
    _S.TRANSFERRING: KVPoll.TRANSFERRING,
    _S.LANDED: KVPoll.TRANSFERRING,
    _S.RUNNING: KVPoll.SUCCESS,
    _S.FINISHED: KVPoll.SUCCESS,
    _S.STOPPING: KVPoll.FAILED,
    _S.DRAINING: KVPoll.FAILED,
    _S.FAILED: KVPoll.FAILED,
}
