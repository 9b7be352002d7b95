"""Any order of events: one end, each leg aborted at most once, nothing after the end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.pair import (
    RETRYABLE,
    SYMPTOMS,
    AbortLeg,
    Answer,
    ClientGone,
    Dispatch,
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

CLOCKS = PairClocks(queue_seconds=10, answer_seconds=100, stall_seconds=5, grace_seconds=0.2)
roles = st.sampled_from(list(Role))
reasons = st.sampled_from(sorted(RETRYABLE | SYMPTOMS | {Reason.MODEL_FAILED, Reason.STALLED}))


class PairMachine(RuleBasedStateMachine):
    """Plays every event at any time against the few promises that the client and the legs have."""

    @initialize(retries=st.integers(0, 3), dispatch=st.sampled_from(list(Dispatch)))
    def begin(self, retries: int, dispatch: Dispatch) -> None:
        self.now = 0.0
        self.retries = retries
        self.pair = Pair(0.0, CLOCKS, retries=retries, dispatch=dispatch)
        self.effects: list[Effect] = []
        self.keys: list[Key] = []
        self.opened: set[tuple[Key, Role]] = set()
        self.aborted: set[tuple[Key, Role]] = set()
        self.answers: list[Answer] = []
        self.retried = 0
        self.byte_seen = False

    def play(self, event: Event) -> None:
        over = self.pair.ended
        effects = self.pair.handle(event, self.now)
        assert not (over and effects), "an ended pair acted"
        for effect in effects:
            assert not self.answers, "something came after the answer"
            self.note(effect)

    def note(self, effect: Effect) -> None:
        match effect:
            case OpenLeg(key, role):
                assert key == self.keys[-1]
                assert (key, role) not in self.opened
                self.opened.add((key, role))
            case AbortLeg(key, role):
                assert (key, role) in self.opened
                assert (key, role) not in self.aborted
                self.aborted.add((key, role))
            case Retry():
                self.retried += 1
                assert not self.byte_seen
            case Answer():
                self.answers.append(effect)

    def key(self, *, stale: bool) -> Key:
        if self.keys and not stale:
            return self.keys[-1]
        return self.keys[0] if len(self.keys) > 1 else Key(999, 999)

    @rule()
    def choose(self) -> None:
        self.keys.append(Key(len(self.keys) + 1, 1))
        before = self.pair.state
        self.play(PairChosen(self.keys[-1], "p", "d"))
        if before is not PairState.QUEUED:
            self.keys.pop()

    @rule(role=roles, stale=st.booleans())
    def answer(self, role: Role, *, stale: bool) -> None:
        self.play(LegAnswered(self.key(stale=stale), role))

    @rule(role=roles, reason=reasons, witness=st.sampled_from(list(Witness)), stale=st.booleans())
    def fail(self, role: Role, reason: Reason, witness: Witness, *, stale: bool) -> None:
        self.play(LegFailed(self.key(stale=stale), role, reason, "", witness=witness))

    @rule(stale=st.booleans())
    def first_byte(self, *, stale: bool) -> None:
        self.play(FirstByte(self.key(stale=stale)))
        self.byte_seen = self.byte_seen or self.pair.state is PairState.STREAMING

    @rule(
        incarnation=st.sampled_from(["p", "d", "x"]),
        kind=st.sampled_from([PeerDead, PeerSilent, PeerHeard]),
    )
    def peer(self, incarnation: str, kind: type[PeerDead | PeerSilent | PeerHeard]) -> None:
        self.play(kind(incarnation))

    @rule()
    def give_up_queue(self) -> None:
        self.play(NoPairChosen(Reason.NO_PAIR, ""))

    @rule()
    def leave(self) -> None:
        self.play(ClientGone())

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.play(Tick())

    @precondition(lambda self: self.pair.deadline() is not None)
    @rule()
    def wait_for_the_deadline(self) -> None:
        deadline = self.pair.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        before = self.pair.state, self.retried
        self.play(Tick())
        assert self.pair.ended or before != (self.pair.state, self.retried), (
            "a clock ran out in vain"
        )

    @invariant()
    def holds(self) -> None:
        self.pair.check()
        assert len(self.answers) == self.pair.ended
        assert self.retried <= self.retries
        if not self.pair.ended:
            assert self.pair.deadline() is not None


PairMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestPair = PairMachine.TestCase
