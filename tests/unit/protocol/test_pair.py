"""One sequence, two legs: every order of ends has one answer, and it names the true cause."""

from __future__ import annotations

import itertools

import pytest

from pdcluster_protocol.errors import IllegalTransition, Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.pair import (
    TABLE,
    AbortLeg,
    Answer,
    Cause,
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
    Trigger,
    Witness,
)

P, D = Role.PREFILL, Role.DECODE
K1, K2 = Key(7, 1), Key(9, 2)
CLOCKS = PairClocks(queue_seconds=60, answer_seconds=600, stall_seconds=30, grace_seconds=0.15)


class Played:
    """A pair that is checked after every event."""

    def __init__(self, *, retries: int = 1, dispatch: Dispatch = Dispatch.PARALLEL) -> None:
        self.pair = Pair(0.0, CLOCKS, retries=retries, dispatch=dispatch)

    def __call__(self, event: Event, *, at: float = 1.0) -> list[Effect]:
        effects = self.pair.handle(event, at)
        self.pair.check()
        return effects

    def choose(self, key: Key = K1, *, at: float = 1.0) -> list[Effect]:
        return self(PairChosen(key, "p1", "d1"), at=at)


def failed(
    role: Role, reason: Reason, *, key: Key = K1, seen: bool = False, status: int | None = None
) -> LegFailed:
    witness = Witness.ROUTER if seen else Witness.LEG
    return LegFailed(key, role, reason, f"{role} says {reason}", witness=witness, status=status)


def cause_of(effects: list[Effect]) -> Cause:
    """The cause of the one answer among the effects."""
    answers = [effect for effect in effects if isinstance(effect, Answer)]
    assert 1 == len(answers)
    assert answers[0].cause is not None
    return answers[0].cause


def test_a_push_pair_opens_both_legs_and_ends_with_decodes_answer() -> None:
    play = Played()

    assert [OpenLeg(K1, P), OpenLeg(K1, D)] == play.choose()
    assert [] == play(LegAnswered(K1, P))
    assert [] == play(FirstByte(K1))
    assert [Answer(None)] == play(LegAnswered(K1, D))
    assert PairState.DONE is play.pair.state
    assert play.pair.deadline() is None


def test_a_pull_pair_opens_decode_when_prefill_has_answered() -> None:
    play = Played(dispatch=Dispatch.SERIAL)

    assert [OpenLeg(K1, P)] == play.choose()
    assert [OpenLeg(K1, D)] == play(LegAnswered(K1, P))
    assert [Answer(None)] == play(LegAnswered(K1, D))


def test_a_plain_answer_needs_no_first_byte_and_may_overtake_prefills() -> None:
    play = Played()
    play.choose()

    assert [Answer(None)] == play(LegAnswered(K1, D))
    assert [] == play(LegAnswered(K1, P))


@pytest.mark.parametrize("role", [P, D])
def test_either_leg_that_fails_aborts_the_other_at_once(role: Role) -> None:
    play = Played(retries=0)
    play.choose()
    other = D if role is P else P

    effects = play(failed(role, Reason.MODEL_FAILED))

    assert [AbortLeg(K1, other, Reason.MODEL_FAILED), Answer(cause_of(effects))] == effects
    assert (Reason.MODEL_FAILED, role) == (cause_of(effects).reason, cause_of(effects).role)
    assert PairState.FAILED is play.pair.state


@pytest.mark.parametrize(
    ("symptom", "truth"),
    list(
        itertools.product(
            [Reason.ABORTED, Reason.CLIENT_GONE, Reason.PEER_FAILED, Reason.PEER_DIED],
            [(P, D), (D, P)],
        )
    ),
)
def test_a_symptom_waits_for_the_truer_cause_of_the_other_leg(
    symptom: Reason, truth: tuple[Role, Role]
) -> None:
    play = Played(retries=0)
    play.choose()
    sufferer, culprit = truth

    assert [AbortLeg(K1, culprit, Reason.PEER_FAILED)] == play(failed(sufferer, symptom))
    assert 1.15 == play.pair.deadline()
    effects = play(failed(culprit, Reason.CHECKSUM_MISMATCH), at=1.1)

    assert (Reason.CHECKSUM_MISMATCH, culprit) == (
        cause_of(effects).reason,
        cause_of(effects).role,
    )


def test_a_symptom_alone_is_the_answer_after_the_grace() -> None:
    play = Played(retries=0)
    play.choose()
    play(failed(D, Reason.PEER_FAILED))

    assert [] == play(Tick(), at=1.1)
    assert Reason.PEER_FAILED is cause_of(play(Tick(), at=1.15)).reason


def test_of_two_symptoms_the_first_is_the_answer() -> None:
    play = Played(retries=0)
    play.choose()
    play(failed(D, Reason.PEER_FAILED))

    assert (Reason.PEER_FAILED, D) == _reason_and_role(play(failed(P, Reason.ABORTED)))


def test_a_symptom_after_the_others_answer_does_not_wait() -> None:
    play = Played(retries=0)
    play.choose()
    play(LegAnswered(K1, P))

    assert Reason.PEER_FAILED is cause_of(play(failed(D, Reason.PEER_FAILED))).reason


def test_an_answer_that_arrives_while_judging_proves_the_symptom() -> None:
    play = Played(retries=0)
    play.choose()
    play(failed(P, Reason.ABORTED))

    assert not play.pair.relays
    assert (Reason.ABORTED, P) == _reason_and_role(play(LegAnswered(K1, D)))


def test_what_the_router_saw_is_no_symptom_and_the_leg_is_aborted_too() -> None:
    play = Played(retries=0)
    play.choose()

    effects = play(failed(P, Reason.PEER_UNREACHABLE, seen=True, status=502))

    aborts = {effect.role for effect in effects if isinstance(effect, AbortLeg)}
    assert {P, D} == aborts
    assert (Reason.PEER_UNREACHABLE, P) == _reason_and_role(effects)
    assert 502 == cause_of(effects).status


def test_a_retry_has_a_new_key_and_leftovers_of_the_old_one_change_nothing() -> None:
    play = Played()
    play.choose()

    effects = play(failed(P, Reason.ROOM_IN_USE))
    assert [AbortLeg, Retry] == [type(effect) for effect in effects]
    assert PairState.QUEUED is play.pair.state

    assert [OpenLeg(K2, P), OpenLeg(K2, D)] == play.choose(K2)
    for leftover in (failed(D, Reason.ABORTED), LegAnswered(K1, D), FirstByte(K1)):
        assert [] == play(leftover)
    assert 3 == play.pair.stale_count
    assert [Answer(None)] == play(LegAnswered(K2, D))


def test_retries_are_counted() -> None:
    play = Played(retries=1)
    play.choose()
    play(failed(D, Reason.NOT_READY))
    play.choose(K2)

    assert Reason.SHUTTING_DOWN is cause_of(play(failed(D, Reason.SHUTTING_DOWN, key=K2))).reason


def test_a_retry_that_finds_no_pair_answers_with_the_first_cause() -> None:
    play = Played()
    play.choose()
    play(failed(P, Reason.ENGINE_DIED, seen=True))

    effects = play(NoPairChosen(Reason.NO_PAIR, "none"), at=61.0)

    assert (Reason.ENGINE_DIED, P) == _reason_and_role(effects)


@pytest.mark.parametrize(
    "reason", [Reason.INVALID_REQUEST, Reason.TOO_LARGE, Reason.CHECKSUM_MISMATCH, Reason.STALLED]
)
def test_what_another_pair_would_not_mend_is_not_retried(reason: Reason) -> None:
    play = Played(retries=5)
    play.choose()

    assert reason is cause_of(play(failed(P, reason))).reason


def test_after_the_first_byte_nothing_is_retried() -> None:
    play = Played(retries=5)
    play.choose()
    play(FirstByte(K1))

    assert (Reason.ENGINE_DIED, D) == _reason_and_role(
        play(failed(D, Reason.ENGINE_DIED, seen=True))
    )


def test_after_the_first_byte_prefills_failure_is_remembered_only() -> None:
    play = Played(retries=0)
    play.choose()
    play(FirstByte(K1))

    assert [] == play(failed(P, Reason.MODEL_FAILED))
    assert PairState.STREAMING is play.pair.state
    assert [Answer(None)] == play(LegAnswered(K1, D))


def test_what_was_remembered_is_the_true_cause_of_decodes_later_symptom() -> None:
    play = Played(retries=0)
    play.choose()
    play(FirstByte(K1))
    play(failed(P, Reason.MODEL_FAILED))

    assert (Reason.MODEL_FAILED, P) == _reason_and_role(play(failed(D, Reason.PEER_FAILED)))


@pytest.mark.parametrize("steps", [[], [FirstByte(K1)], [failed(D, Reason.PEER_FAILED)]])
def test_a_client_that_leaves_aborts_every_open_leg_once(steps: list[Event]) -> None:
    play = Played()
    effects = play.choose()
    for step in steps:
        effects += play(step)
    effects += play(ClientGone())

    aborted = [effect.role for effect in effects if isinstance(effect, AbortLeg)]
    assert len(aborted) == len(set(aborted))
    assert P in aborted
    assert Reason.CLIENT_GONE is cause_of(effects).reason
    assert PairState.GONE is play.pair.state
    assert [] == play(ClientGone())


def test_a_client_that_leaves_the_queue_aborts_nothing() -> None:
    play = Played()

    assert Reason.CLIENT_GONE is cause_of(play(ClientGone())).reason


def test_a_dead_peer_fails_its_leg_and_a_stranger_does_not() -> None:
    play = Played(retries=0)
    play.choose()

    assert [] == play(PeerDead("other"))
    assert (Reason.ENGINE_DIED, D) == _reason_and_role(play(PeerDead("d1")))


def test_a_prefill_that_dies_after_its_answer_changes_nothing() -> None:
    play = Played()
    play.choose()
    play(LegAnswered(K1, P))

    assert [] == play(PeerDead("p1"))
    assert [Answer(None)] == play(LegAnswered(K1, D))


def test_a_silent_peer_leaves_a_stall_without_progress() -> None:
    play = Played(retries=0)
    play.choose()
    assert 601.0 == play.pair.deadline()

    play(PeerSilent("d1"))
    play(PeerHeard("d1"))
    assert 601.0 == play.pair.deadline()
    play(PeerSilent("d1"))
    play(PeerHeard("p1"))
    assert 31.0 == play.pair.deadline()
    play.pair.progressed(20.0)
    assert 50.0 == play.pair.deadline()
    effects = play(Tick(), at=50.0)
    assert (Reason.STALLED, D) == _reason_and_role(effects)
    assert "silent" in cause_of(effects).detail


def test_each_clock_names_itself() -> None:
    queued, waiting, streaming = Played(), Played(), Played()
    waiting.choose()
    waiting(LegAnswered(K1, P))
    streaming.choose()
    streaming(LegAnswered(K1, P))
    streaming(FirstByte(K1), at=10.0)

    assert [] == queued(Tick(), at=59.9)
    assert Reason.QUEUE_TIMEOUT is cause_of(queued(Tick(), at=60.0)).reason
    assert (Reason.DEADLINE_EXCEEDED, D) == _reason_and_role(waiting(Tick(), at=601.0))
    assert 40.0 == streaming.pair.deadline()
    streaming.pair.progressed(35.0)
    assert [] == streaming(Tick(), at=40.0)
    assert (Reason.STALLED, D) == _reason_and_role(streaming(Tick(), at=65.0))


def test_doubles_and_events_after_the_end_change_nothing() -> None:
    play = Played(retries=0)
    play.choose()
    assert [] == play.choose(K2)
    play(LegAnswered(K1, P))
    assert [] == play(LegAnswered(K1, P))
    assert [] == play(failed(P, Reason.MODEL_FAILED))
    play(LegAnswered(K1, D))

    for event in (failed(D, Reason.MODEL_FAILED), PeerDead("d1"), Tick(), ClientGone()):
        assert [] == play(event, at=9999.0)


def test_the_story_is_told_in_order() -> None:
    play = Played()
    play.choose()
    play(failed(P, Reason.ROOM_IN_USE))
    play.choose(K2)
    play(FirstByte(K2))
    play(LegAnswered(K2, D))

    assert [
        "pair: queued --choose--> running (7.1)",
        "pair: running --retry--> queued (prefill: RoomInUse)",
        "pair: queued --choose--> running (9.2)",
        "pair: running --byte--> streaming",
        "pair: streaming --answer--> done",
    ] == [str(step) for step in play.pair.story()]


def test_the_table_has_no_way_back_from_streaming_to_the_queue() -> None:
    assert not TABLE.allows(PairState.STREAMING, Trigger.RETRY)
    assert "running --> queued: retry" in TABLE.mermaid()
    with pytest.raises(IllegalTransition):
        TABLE.advance(PairState.DONE, Trigger.FAIL)


def _reason_and_role(effects: list[Effect]) -> tuple[Reason, Role | None]:
    cause = cause_of(effects)
    return cause.reason, cause.role
