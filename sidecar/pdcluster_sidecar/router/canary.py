"""A short request through a named pair: the proof that it works while no client uses it."""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import msgspec

from pdcluster_protocol.config import RouterConfig
from pdcluster_protocol.errors import NotReady
from pdcluster_protocol.ids import Role
from pdcluster_protocol.pair import Cause
from pdcluster_protocol.requests import Api, RequestLimits, parse_request
from pdcluster_sidecar.router.bodies import LegBodies, SequenceFields
from pdcluster_sidecar.router.pick import Place, Placement
from pdcluster_sidecar.router.request import WorkSize, make_work
from pdcluster_sidecar.router.sequence import Sequence, Surroundings

PROMPT: Final = b"[1,2,3,4,5,6,7,8]"
PROMPT_TOKENS: Final = 8
OUTPUT_TOKENS: Final = 2


class CanaryRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /pd/v1/canary`: instances by name."""

    prefill: str
    decode: str


class CanaryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How the canary fared; `reason` is empty when it was answered."""

    ok: bool
    prefill: str
    decode: str
    seconds: float
    rid: str = ""
    reason: str = ""
    leg: str = ""
    detail: str = ""
    answer: msgspec.Raw = msgspec.Raw(b"null")


class CanarySink:
    """Keeps a canary's answer until it is asked for."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Cause | None] = asyncio.get_running_loop().create_future()
        self.answer = b"null"

    def take_events(self, events: bytes) -> None:
        """Canaries do not stream."""

    def take_answer(self, body: bytes, content_type: bytes) -> None:
        if content_type.startswith(b"application/json"):
            self.answer = body

    def conclude(self, cause: Cause | None) -> None:
        if not self.ended.done():
            self.ended.set_result(cause)


class Canary:
    """Runs canaries outside the queue: they prove a pair also while all places are taken."""

    def __init__(self, config: RouterConfig, shared: Surroundings) -> None:
        self._config = config
        # A pair that works at the second try only is no proven pair.
        self._shared = msgspec.structs.replace(shared, retries=0)

    async def run(self, wanted: CanaryRequest) -> CanaryAnswer:
        """Two tokens through a named pair.

        Raises:
            NotReady: one of the two is not usable.
        """
        placement = Placement(
            self._named(wanted.prefill, Role.PREFILL), self._named(wanted.decode, Role.DECODE)
        )
        if placement.prefill.member.fingerprint != placement.decode.member.fingerprint:
            raise NotReady(
                f"{wanted.prefill} and {wanted.decode} have different fingerprints: no pair"
            )
        rid = f"pd-canary-{secrets.token_hex(12)}"
        body = b'{"prompt":%b,"max_tokens":%d,"temperature":0}' % (PROMPT, OUTPUT_TOKENS)
        limits = RequestLimits(self._config.served_name, self._config.max_context)
        parsed = parse_request(Api.COMPLETIONS, body, limits)
        work = make_work(
            self._config,
            parsed,
            WorkSize(PROMPT_TOKENS, OUTPUT_TOKENS),
            bodies=LegBodies(parsed),
            fields=SequenceFields(rid=rid, input_ids=msgspec.Raw(PROMPT), seed=0),
        )
        sink = CanarySink()
        work = msgspec.structs.replace(work, placement=placement)
        sequence = Sequence(work, sink, self._shared)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        sequence.start()
        try:
            cause = await sink.ended
        finally:
            sequence.leave("nobody waits for the canary any more")
        return CanaryAnswer(
            ok=cause is None,
            prefill=wanted.prefill,
            decode=wanted.decode,
            seconds=round(loop.time() - started_at, 4),
            rid=rid,
            reason="" if cause is None else cause.reason,
            leg="" if cause is None else str(cause.role or ""),
            detail="" if cause is None else cause.detail,
            answer=msgspec.Raw(sink.answer),
        )

    def _named(self, instance: str, role: Role) -> Place:
        for candidate in self._shared.members.candidates():
            if candidate.instance == instance and candidate.role is role:
                return Place(candidate, candidate.slots[0])
        raise NotReady(f"{role} is {instance!r}; no usable {role} has that name")
