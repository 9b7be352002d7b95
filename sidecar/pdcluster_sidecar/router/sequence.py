"""The shell around one `Pair`: turns its effects into legs, aborts and answers, and back.

A `Sequence` is one prompt's one sample. It waits for a pair, mints the key of each try, opens and
closes legs as the machine says, keeps its one timer, and hands decode's bytes to its sink. All
decisions are the machine's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Final, NamedTuple, Protocol, assert_never

import msgspec
import structlog

from pdcluster_protocol.control_api import AbortRequest
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import ATTEMPT_RANDOM_BITS, Key, Role, mint_attempt, mint_room
from pdcluster_protocol.pair import (
    AbortLeg,
    Answer,
    Cause,
    ClientGone,
    Effect,
    Event,
    FirstByte,
    LegAnswered,
    LegFailed,
    NoPairChosen,
    OpenLeg,
    Pair,
    PairChosen,
    PairClocks,
    PairState,
    PeerDead,
    PeerHeard,
    PeerSilent,
    Retry,
    Tick,
    Witness,
)
from pdcluster_sidecar.router.admission import Admission
from pdcluster_sidecar.router.alarms import Alarms
from pdcluster_sidecar.router.answers import LegAnswer, LegStream
from pdcluster_sidecar.router.bodies import LegBodies, PairFields, SequenceFields
from pdcluster_sidecar.router.calls import SidecarCalls
from pdcluster_sidecar.router.legs import Leg, LegPool
from pdcluster_sidecar.router.members import Members
from pdcluster_sidecar.router.pick import Place, Placement
from pdcluster_sidecar.router.running import Running
from pdcluster_sidecar.router.telemetry import Metrics, Phase

ENTROPY_BYTES: Final = 11
"""63 bits for a room and 22 for an attempt."""
DRAIN_SECONDS: Final = 5.0
"""How long prefill's answer may come after decode's, before its connection is closed."""


class Sink(Protocol):
    """Where a sequence's answer goes: events or one whole answer, then one conclusion."""

    def take_events(self, events: bytes) -> None: ...

    def take_answer(self, body: bytes, content_type: bytes) -> None: ...

    def conclude(self, cause: Cause | None) -> None: ...


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What all sequences of a router share."""

    pool: LegPool
    calls: SidecarCalls
    members: Members
    admission: Admission
    metrics: Metrics
    running: Running[Sequence]
    alarms: Alarms[Sequence]
    log: structlog.typing.FilteringBoundLogger
    retries: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence is to compute, and within which clocks."""

    path: str
    stream: bool
    bodies: LegBodies
    fields: SequenceFields
    clocks: PairClocks
    budget_seconds: float
    pages_needed: int
    digest: str | None
    placement: Placement | None = None
    """A named pair, for canaries; None: the queue chooses."""


class Try(NamedTuple):
    """One try as log lines name it."""

    key: Key
    prefill: str
    decode: str


class Sequence:
    """One prompt's one sample, from its place in the queue to its one end."""

    __slots__ = (
        "_alarm_at",
        "_dispatched_at",
        "_legs",
        "_loop",
        "_pair_fields",
        "_placement",
        "_prefill_released",
        "_pressed",
        "_queued_at",
        "_rid",
        "_shared",
        "_sink",
        "_started_at",
        "_work",
        "pair",
        "trail",
    )

    def __init__(self, work: Work, sink: Sink, shared: Surroundings) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._sink = sink
        self._shared = shared
        self._legs: dict[Role, Leg] = {}
        self._placement: Placement | None = None
        self._pair_fields: PairFields | None = None
        self._rid = work.fields.rid
        """Of this try: the engine that serves it may not have ended the one before yet."""
        self._prefill_released = False
        self._pressed = False
        self._alarm_at: float | None = None
        # The loop's own clock is coarse: good for deadlines, not for metrics.
        self._started_at = self._queued_at = self._dispatched_at = time.monotonic()
        self.trail: list[Try] = []
        self.pair = Pair(self._loop.time(), work.clocks, retries=shared.retries)

    @property
    def pages_needed(self) -> int:
        return self._work.pages_needed

    @property
    def digest(self) -> str | None:
        return self._work.digest

    def start(self) -> None:
        """Line up for a pair."""
        self._shared.running.add(self)
        self._arm()
        if self._work.placement is not None:
            self.placed(self._work.placement)
        else:
            self._shared.admission.enter(self)

    def leave(self, detail: str, *, reason: Reason = Reason.CLIENT_GONE) -> None:
        """Nobody wants the answer any more."""
        self._handle(ClientGone(detail, reason))

    def press(self, *, pressed: bool) -> None:
        """The client takes nothing more, or takes again: decode is held back, or goes on."""
        self._pressed = pressed
        if (leg := self._legs.get(Role.DECODE)) is not None:
            leg.hold(held=pressed)
        if not pressed:
            # What held the stream up was the client: the engine's clock starts anew.
            self.pair.progressed(self._loop.time())

    def peer_event(self, event: PeerDead | PeerSilent | PeerHeard) -> None:
        """Something happened to an instance."""
        self._handle(event)

    def placed(self, placement: Placement) -> None:
        """The queue has found a pair for this try."""
        now = time.monotonic()
        self._placement = placement
        self._prefill_released = False
        prefill, decode = placement.prefill, placement.decode
        key = _mint_key(prefill)
        self._shared.metrics.spent(Phase.QUEUE, now - self._queued_at)
        self._dispatched_at = now
        if self.trail:
            self._rid = f"{self._work.fields.rid}-try{len(self.trail)}"
        self.trail.append(Try(key, prefill.member.instance, decode.member.instance))
        self._pair_fields = PairFields(
            bootstrap_host=prefill.member.bootstrap.host,
            bootstrap_port=prefill.member.bootstrap.port,
            prefill_dp_rank=prefill.slot.dp_rank,
            decode_dp_rank=decode.slot.dp_rank,
            budget_seconds=self._work.budget_seconds,
        )
        self._handle(PairChosen(key, prefill.member.incarnation, decode.member.incarnation))

    # --- what legs bring ------------------------------------------------------------------------

    def leg_ended(self, event: LegAnswered | LegFailed) -> None:
        """A leg of this or of an earlier try is over."""
        if event.key == self.pair.key:
            self._legs.pop(event.role, None)
            self._note_end(event)
        self._handle(event)

    def leg_progressed(self, key: Key) -> None:
        if key == self.pair.key:
            self.pair.progressed(self._loop.time())

    def relay(self, key: Key, events: bytes) -> None:
        """Whole events of decode's stream; the first of them is the machine's `FirstByte`."""
        pair = self.pair
        if key != pair.key:
            return
        if pair.state is PairState.RUNNING:
            self._shared.metrics.spent(Phase.FIRST_BYTE, time.monotonic() - self._dispatched_at)
            self._handle(FirstByte(key))
        if pair.relays:
            pair.progressed(self._loop.time())
            self._sink.take_events(events)

    def take_answer(self, key: Key, body: bytes, content_type: bytes) -> None:
        """Decode's whole answer; it counts once the machine says so."""
        if key == self.pair.key and self.pair.relays:
            self._shared.metrics.spent(Phase.FIRST_BYTE, time.monotonic() - self._dispatched_at)
            self._sink.take_answer(body, content_type)

    # --- effects --------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for effect in self.pair.handle(event, self._loop.time()):
            self._execute(effect)
        self._arm()

    def _execute(self, effect: Effect) -> None:
        match effect:
            case OpenLeg():
                self._open(effect)
            case AbortLeg():
                self._abort(effect)
            case Retry():
                self._shared.metrics.retries.inc()
                self._end_try()
                self._retry()
            case Answer():
                self._finish(effect.cause)
            case _:
                assert_never(effect)

    def _open(self, effect: OpenLeg) -> None:
        placement, pair = self._placement, self._pair_fields
        work = self._work
        if placement is None or pair is None or effect.key != self.pair.key:
            return
        body = work.bodies.encode(
            effect.role, effect.key, rid=self._rid, sequence=work.fields, pair=pair
        )
        listener = (
            LegStream(self, effect.key)
            if work.stream and effect.role is Role.DECODE
            else LegAnswer(self, effect.key, effect.role)
        )
        address = placement.of(effect.role).slot.address
        leg = self._shared.pool.post(address, work.path, body, listener)
        self._legs[effect.role] = leg
        if self._pressed and effect.role is Role.DECODE:
            leg.hold(held=True)

    def _abort(self, effect: AbortLeg) -> None:
        placement = self._placement
        if placement is None:
            return
        self._shared.metrics.aborts.inc()
        address = self._shared.members.sidecar(placement.of(effect.role).member.instance)
        self._shared.calls.abort(address, AbortRequest(self._rid, effect.key, effect.reason))

    def _retry(self) -> None:
        self._queued_at = time.monotonic()
        if self._work.placement is not None:
            self._loop.call_soon(
                self._handle, NoPairChosen(Reason.NO_PAIR, "the named pair failed")
            )
        else:
            self._shared.admission.enter(self, first=True)

    def _finish(self, cause: Cause | None) -> None:
        if cause is None and (leg := self._legs.pop(Role.PREFILL, None)) is not None:
            leg.drain(seconds=DRAIN_SECONDS)
        self._end_try()
        shared = self._shared
        shared.admission.leave(self)
        shared.running.discard(self)
        shared.metrics.spent(Phase.TOTAL, time.monotonic() - self._started_at)
        shared.alarms.clear(self)
        self._sink.conclude(cause)

    def _end_try(self) -> None:
        """Close what is open of this try, and give its place back."""
        for leg in self._legs.values():
            leg.cancel()
        self._legs.clear()
        placement, self._placement = self._placement, None
        if placement is None:
            return
        if self._work.placement is None:
            self._shared.admission.release(placement, prefill_released=self._prefill_released)

    def _note_end(self, event: LegAnswered | LegFailed) -> None:
        placement = self._placement
        if placement is None:
            return
        if isinstance(event, LegFailed):
            if event.witness is Witness.ROUTER or event.reason in _NOT_SERVING:
                self._shared.members.blame(placement.of(event.role).member.instance)
        elif event.role is Role.PREFILL and self._work.placement is None:
            # Its rank is free for the next prompt, long before decode is through.
            self._prefill_released = True
            placement.prefill.slot.in_flight -= 1

    # --- time -----------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Keep one alarm, no later than the deadline; one that rings early is set again."""
        deadline = self.pair.deadline()
        if deadline is None or (self._alarm_at is not None and self._alarm_at <= deadline):
            return
        self._alarm_at = deadline
        self._shared.alarms.set(self, deadline)

    def wake(self) -> None:
        """The alarm rings."""
        self._alarm_at = None
        deadline = self.pair.deadline()
        if deadline is None or self._loop.time() < deadline:
            self._arm()
            return
        if self._pressed and self.pair.state is PairState.STREAMING:
            stall = self._work.clocks.stall_seconds
            self.leave(f"the client has read nothing for {stall:g} s")
        elif self.pair.state is PairState.QUEUED and not self._shared.admission.has_pair(
            self.digest
        ):
            why = _no_pair(self._shared.members, seconds=self._work.clocks.queue_seconds)
            self._handle(NoPairChosen(Reason.NO_PAIR, why))
        else:
            self._handle(Tick())


def _mint_key(prefill: Place) -> Key:
    """A new name for a try: a room of prefill's rank, and an attempt."""
    entropy = int.from_bytes(secrets.token_bytes(ENTROPY_BYTES))
    return Key(
        mint_room(
            entropy >> ATTEMPT_RANDOM_BITS,
            dp_size=prefill.member.dp_size,
            dp_rank=prefill.slot.dp_rank,
        ),
        mint_attempt(time.time_ns() // 1_000_000, entropy),
    )


_NOT_SERVING: Final = frozenset({Reason.NOT_READY, Reason.SHUTTING_DOWN})


def _no_pair(members: Members, *, seconds: float) -> str:
    """What a client reads who has waited in vain."""
    waited = f"no prefill and decode of one fingerprint were ready within {seconds:g} s"
    return f"{waited}; {members.shortage()}"
