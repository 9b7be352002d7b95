"""The machine; its theory stands at the top of the package, its table in `table`."""

from __future__ import annotations

from collections import deque
from typing import Final, assert_never

from pdcluster_protocol.errors import HTTP_STATUS, InvariantViolated, Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.pair.events import (
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
    PairChosen,
    PairClocks,
    PeerDead,
    PeerHeard,
    PeerSilent,
    Retry,
    Tick,
    Witness,
)
from pdcluster_protocol.pair.table import (
    OPENED_BY,
    RETRYABLE,
    SYMPTOMS,
    TABLE,
    Dispatch,
    LegState,
    PairState,
    Trigger,
)
from pdcluster_protocol.story import Transition

STORY_LENGTH_MAX: Final = 32
_ALL_CLOSED: Final = dict.fromkeys(Role, LegState.CLOSED)


class Pair:
    """One sequence from its arrival to its end; the theory is at the top of the package."""

    __slots__ = (
        "_aborted",
        "_clocks",
        "_dispatch",
        "_first_cause",
        "_held",
        "_incarnations",
        "_judge_at",
        "_legs",
        "_progress_at",
        "_retries_left",
        "_since",
        "_story",
        "_streamed",
        "_suspected",
        "key",
        "stale_count",
        "state",
    )

    def __init__(
        self,
        now: float,
        clocks: PairClocks,
        *,
        retries: int,
        dispatch: Dispatch = Dispatch.PARALLEL,
    ) -> None:
        self._clocks = clocks
        self._dispatch = dispatch
        self._retries_left = retries
        self._first_cause: Cause | None = None
        self._streamed = False
        self._story: deque[Transition] = deque(maxlen=STORY_LENGTH_MAX)
        self.key: Key | None = None
        self.state: PairState = TABLE.initial
        self.stale_count = 0
        self._since = self._progress_at = self._judge_at = now
        self._legs: dict[Role, LegState] = _ALL_CLOSED.copy()
        self._aborted: set[Role] = set()
        self._incarnations: dict[Role, str] = {}
        self._held: Cause | None = None
        self._suspected: set[str] = set()

    @property
    def relays(self) -> bool:
        """Whether what decode sends now may reach the client."""
        return self.state in {PairState.RUNNING, PairState.STREAMING}

    @property
    def ended(self) -> bool:
        """Whether the `Answer` was given."""
        return self.state in TABLE.terminals

    def progressed(self, now: float) -> None:
        """A byte of decode's answer came: the stall clock starts again. Cheap, for every event."""
        self._progress_at = now

    def deadline(self) -> float | None:
        """The latest time for the next `Tick`; None when ended."""
        clocks = self._clocks
        match self.state:
            case PairState.QUEUED:
                return self._since + clocks.queue_seconds
            case PairState.RUNNING:
                answer_at = self._since + clocks.answer_seconds
                stall_at = self._progress_at + clocks.stall_seconds
                return min(answer_at, stall_at) if self._suspected else answer_at
            case PairState.STREAMING:
                return self._progress_at + clocks.stall_seconds
            case PairState.JUDGING:
                return self._judge_at
            case PairState.DONE | PairState.FAILED | PairState.GONE:
                return None
            case _:
                assert_never(self.state)

    def story(self) -> tuple[Transition, ...]:
        """The newest steps, oldest first."""
        return tuple(self._story)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; what to do comes back, in order. Never raises for a peer's fault."""
        if self.ended:
            return []
        match event:
            case PairChosen() | NoPairChosen():
                return self._queue_event(event, now)
            case LegAnswered() | LegFailed() | FirstByte():
                return self._leg_event(event, now)
            case ClientGone():
                return self._client_gone(event, now)
            case PeerDead() | PeerSilent() | PeerHeard():
                return self._peer_event(event, now)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Assert what must hold between any two events.

        Raises:
            InvariantViolated: naming the state that must not exist.
        """
        legs = self._legs
        rules = (
            ("a queued pair has no key", self.state is not PairState.QUEUED or self.key is None),
            ("a key belongs to a try", (self.key is None) == (not self._incarnations)),
            (
                "no leg is open without a key",
                self.key is not None or set(legs.values()) == {LegState.CLOSED},
            ),
            ("judging needs a held cause", not self._judges or self._held is not None),
            (
                "an ended pair has aborted every open leg",
                not self.ended
                or self.state is PairState.DONE
                or all(role in self._aborted for role in Role if legs[role] is LegState.OPEN),
            ),
            (
                "done means that decode answered",
                self.state is not PairState.DONE or legs[Role.DECODE] is LegState.ANSWERED,
            ),
        )
        for rule, holds in rules:
            if not holds:
                raise InvariantViolated(f"pair: {rule}; state {self.state}, legs {legs}")

    # --- events ---------------------------------------------------------------------------------

    def _queue_event(self, event: PairChosen | NoPairChosen, now: float) -> list[Effect]:
        if self.state is not PairState.QUEUED:
            self.stale_count += 1
            return []
        if isinstance(event, NoPairChosen):
            return self._fail(_cause(event.reason, event.detail), now)
        self.key = event.key
        self._incarnations = {Role.PREFILL: event.prefill, Role.DECODE: event.decode}
        self._since = self._progress_at = now
        self._step(Trigger.CHOOSE, now, str(event.key))
        return self._open(OPENED_BY[self._dispatch][None])

    def _leg_event(self, event: LegAnswered | LegFailed | FirstByte, now: float) -> list[Effect]:
        if event.key != self.key:
            self.stale_count += 1
            return []
        match event:
            case FirstByte():
                return self._first_byte(now)
            case LegAnswered():
                return self._leg_answered(event.role, now)
            case LegFailed():
                return self._leg_failed(event, now)
            case _:
                assert_never(event)

    def _first_byte(self, now: float) -> list[Effect]:
        if self.state is PairState.RUNNING and self._legs[Role.DECODE] is LegState.OPEN:
            self._progress_at = now
            self._streamed = True
            self._step(Trigger.BYTE, now)
        return []

    def _leg_answered(self, role: Role, now: float) -> list[Effect]:
        if self._legs[role] is not LegState.OPEN:
            self.stale_count += 1
            return []
        self._legs[role] = LegState.ANSWERED
        if self._judges:
            # The other leg had nothing truer to say, and decode's bytes are no longer relayed.
            return self._conclude(self._held_cause(), now)
        if role is Role.DECODE:
            self._step(Trigger.ANSWER, now)
            return [Answer(None)]
        return self._open(OPENED_BY[self._dispatch].get(role, ()))

    def _leg_failed(self, event: LegFailed, now: float) -> list[Effect]:
        if self._legs[event.role] is not LegState.OPEN:
            self.stale_count += 1
            return []
        seen = event.witness is Witness.ROUTER
        self._legs[event.role] = LegState.LOST if seen else LegState.FAILED
        cause = _cause(event.reason, event.detail, role=event.role, status=event.status)
        symptom = not seen and event.reason in SYMPTOMS
        if self.state is PairState.STREAMING and event.role is Role.PREFILL:
            self._held = None if symptom else cause
            return []
        if self._held is not None:
            return self._conclude(self._held if symptom else cause, now)
        if symptom and self._legs[_other(event.role)] is LegState.OPEN:
            self._held = cause
            self._judge_at = now + self._clocks.grace_seconds
            self._step(Trigger.SYMPTOM, now, f"{event.role}: {event.reason}")
            return self._abort(Reason.PEER_FAILED)
        return self._conclude(cause, now)

    def _client_gone(self, event: ClientGone, now: float) -> list[Effect]:
        self._step(Trigger.LEAVE, now, event.detail)
        cause = _cause(event.reason, event.detail)
        return [*self._abort(event.reason), Answer(cause)]

    def _peer_event(self, event: PeerDead | PeerSilent | PeerHeard, now: float) -> list[Effect]:
        key = self.key
        if key is None or event.incarnation not in self._incarnations.values():
            return []
        if not isinstance(event, PeerDead):
            self._suspected.discard(event.incarnation)
            if isinstance(event, PeerSilent):
                self._suspected.add(event.incarnation)
            return []
        effects: list[Effect] = []
        for role, incarnation in tuple(self._incarnations.items()):
            if incarnation == event.incarnation and not self.ended:
                detail = event.detail or f"the {role} engine is gone"
                lost = LegFailed(key, role, Reason.ENGINE_DIED, detail, witness=Witness.ROUTER)
                effects += self._leg_event(lost, now)
        return effects

    def _tick(self, now: float) -> list[Effect]:
        deadline = self.deadline()
        if deadline is None or now < deadline:
            return []
        if self._judges:
            return self._conclude(self._held_cause(), now)
        return self._fail(self._overdue(now), now)

    # --- ends -----------------------------------------------------------------------------------

    def _overdue(self, now: float) -> Cause:
        """The cause that names the clock which ran out."""
        clocks = self._clocks
        if self.state is PairState.QUEUED:
            detail = f"no pair was free within {clocks.queue_seconds:g} s"
            return _cause(Reason.QUEUE_TIMEOUT, detail)
        role = self._awaited()
        if self.state is PairState.RUNNING and now >= self._since + clocks.answer_seconds:
            detail = f"no answer within {clocks.answer_seconds:g} s of dispatch"
            return _cause(Reason.DEADLINE_EXCEEDED, detail, role=role)
        silent = "its instance is silent, and " if self._suspected else ""
        detail = f"{silent}no byte came for {clocks.stall_seconds:g} s"
        return _cause(Reason.STALLED, detail, role=role)

    def _awaited(self) -> Role:
        """The leg that time ran out for: of a silent instance, else the first that is open."""
        silent = [role for role, name in self._incarnations.items() if name in self._suspected]
        open_legs = [role for role in Role if self._legs[role] is LegState.OPEN]
        return [*(role for role in silent if role in open_legs), *open_legs][0]

    def _conclude(self, cause: Cause, now: float) -> list[Effect]:
        """End this try by `cause`: retried where that is allowed, else the sequence's end."""
        if self._streamed or cause.reason not in RETRYABLE or self._retries_left <= 0:
            return self._fail(cause, now)
        effects = self._abort(cause.reason)
        self._retries_left -= 1
        self._first_cause = self._first_cause or cause
        self._step(Trigger.RETRY, now, f"{cause.role}: {cause.reason}")
        self._forget_try(now)
        return [*effects, Retry(cause)]

    def _fail(self, cause: Cause, now: float) -> list[Effect]:
        if self.state is PairState.QUEUED and self._first_cause is not None:
            # The retry found no pair: what broke the first try is the truth.
            cause = self._first_cause
        self._step(Trigger.FAIL, now, f"{cause.role or 'router'}: {cause.reason}")
        return [*self._abort(cause.reason), Answer(cause)]

    def _abort(self, reason: Reason) -> list[Effect]:
        """Abort every leg that may still be at work, each at most once."""
        key = self.key
        if key is None:
            return []
        effects: list[Effect] = []
        for role, state in self._legs.items():
            if state in {LegState.OPEN, LegState.LOST} and role not in self._aborted:
                self._aborted.add(role)
                effects.append(AbortLeg(key, role, reason))
        return effects

    # --- bookkeeping ----------------------------------------------------------------------------

    @property
    def _judges(self) -> bool:
        return self.state is PairState.JUDGING

    def _held_cause(self) -> Cause:
        assert self._held is not None, "judging without a cause"
        return self._held

    def _open(self, roles: tuple[Role, ...]) -> list[Effect]:
        key = self.key
        assert key is not None, "a leg is opened for a chosen pair"
        for role in roles:
            self._legs[role] = LegState.OPEN
        return [OpenLeg(key, role) for role in roles]

    def _forget_try(self, now: float) -> None:
        self.key = None
        self._since = self._progress_at = self._judge_at = now
        self._legs = _ALL_CLOSED.copy()
        self._aborted = set()
        self._incarnations = {}
        self._held = None
        self._suspected = set()

    def _step(self, trigger: Trigger, now: float, detail: str = "") -> None:
        before, self.state = self.state, TABLE.advance(self.state, trigger)
        self._story.append(Transition(now, TABLE.name, before, trigger, self.state, detail))


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _cause(
    reason: Reason, detail: str, *, role: Role | None = None, status: int | None = None
) -> Cause:
    status = HTTP_STATUS.get(reason, 500) if status is None else status
    return Cause(reason=reason, detail=detail, role=role, status=status)
