"""The prefill side of one request: its states, their table, and what KVPoll says of them.

    BOOTSTRAPPING   the leg is here, decode's page numbers are not (order 1: no byte may be written)
    ADMITTING       the page numbers are here; waiting for pages of our own to compute into
    COMPUTING       chunks are computed; finished pages are written while later ones still compute
    FLUSHING        the prompt is computed; the last runs and then the metadata rows are landing
    PUBLISHED       everything landed and was announced; waiting for decode's conclusion
    DRAINING        ended badly, but the model or a write may still touch our pages
    FINISHED        decode took everything
    FAILED          ended badly, nothing touches our pages any more

A failure before anything was started ends in FAILED at once; afterwards it goes through DRAINING,
which is left only when the model has let go and no write is outstanding (order 4). This file knows
neither addresses nor messages; `prefill_rooms` fires the triggers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pdcluster_protocol.messages import KVPoll
from pdcluster_protocol.table import Table


class SenderState(StrEnum):
    """Where a prefill room stands."""

    BOOTSTRAPPING = "Bootstrapping"
    ADMITTING = "Admitting"
    COMPUTING = "Computing"
    FLUSHING = "Flushing"
    PUBLISHED = "Published"
    DRAINING = "Draining"
    FINISHED = "Finished"
    FAILED = "Failed"


class SenderTrigger(StrEnum):
    """What moves a prefill room."""

    PAGES_KNOWN = "PagesKnown"
    ADMITTED = "Admitted"
    PROMPT_COMPUTED = "PromptComputed"
    ALL_LANDED = "AllLanded"
    CONCLUDED = "Concluded"
    FAULT = "Fault"
    DRAINED = "Drained"


_S, _T = SenderState, SenderTrigger

SENDER: Final = Table[SenderState, SenderTrigger](
    "sender",
    initial=_S.BOOTSTRAPPING,
    terminals=(_S.FINISHED, _S.FAILED),
    transitions={
        (_S.BOOTSTRAPPING, _T.PAGES_KNOWN): _S.ADMITTING,
        (_S.BOOTSTRAPPING, _T.FAULT): _S.FAILED,
        (_S.ADMITTING, _T.ADMITTED): _S.COMPUTING,
        (_S.ADMITTING, _T.FAULT): _S.FAILED,
        (_S.COMPUTING, _T.PROMPT_COMPUTED): _S.FLUSHING,
        (_S.COMPUTING, _T.FAULT): _S.DRAINING,
        (_S.FLUSHING, _T.ALL_LANDED): _S.PUBLISHED,
        (_S.FLUSHING, _T.FAULT): _S.DRAINING,
        (_S.PUBLISHED, _T.CONCLUDED): _S.FINISHED,
        (_S.PUBLISHED, _T.FAULT): _S.DRAINING,
        (_S.DRAINING, _T.DRAINED): _S.FAILED,
    },
)

KVPOLL: Final[dict[SenderState, KVPoll]] = {
    _S.BOOTSTRAPPING: KVPoll.BOOTSTRAPPING,
    _S.ADMITTING: KVPoll.WAITING_FOR_INPUT,
    _S.COMPUTING: KVPoll.TRANSFERRING,
    _S.FLUSHING: KVPoll.TRANSFERRING,
    _S.PUBLISHED: KVPoll.SUCCESS,
    _S.FINISHED: KVPoll.SUCCESS,
    _S.DRAINING: KVPoll.FAILED,
    _S.FAILED: KVPoll.FAILED,
}
