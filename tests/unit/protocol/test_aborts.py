"""A cancel waits for the acknowledgement of every rank that was given addresses."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_protocol.effects import Count
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import Abort, AbortAck
from pdcluster_protocol.push.aborts import Aborts
from support.ledgers import HERE, LANE, OTHER_LANE, OTHER_PEER, PEER, joined_ledger, key, sent

# By our rank and prefill's unique rank.
WAITING = {(0, 2): LANE, (0, 1): OTHER_LANE}


@pytest.fixture
def ledger() -> Ledger:
    ledger = joined_ledger(limits=Limits(retransmit_seconds_min=0.2, retransmit_seconds_max=0.5))
    for pool in (ledger.pool, ledger.slots):
        pool.reserve(key(), 1)
        pool.quarantine(key(), 0.0)
    return ledger


@pytest.fixture
def aborts(ledger: Ledger) -> Aborts:
    return Aborts(ledger)


def begin(aborts: Aborts, *, provable: bool = True) -> None:
    aborts.begin(key(), waiting=WAITING, incarnation="i", provable=provable)


def ack(aborts: Aborts, rank: int, incarnation: str = "i", *, to: int = 0, **changes: Any) -> bool:
    fields: dict[str, Any] = {"generation": 1} | changes
    return aborts.acknowledged(key(), AbortAck(key(), rank, **fields), incarnation, to)


def asked(ledger: Ledger) -> list[RankAddress]:
    return [to for to, message in sent(ledger.take_effects()) if isinstance(message, Abort)]


def test_every_rank_is_asked_and_only_all_their_answers_are_proof(
    ledger: Ledger, aborts: Aborts
) -> None:
    begin(aborts)
    assert [(PEER, Abort(key(), HERE, 1)), (OTHER_PEER, Abort(key(), HERE, 1))] == sent(
        ledger.take_effects()
    )

    assert not ack(aborts, 2)
    assert not ack(aborts, 2)
    assert ack(aborts, 1)


def test_it_is_repeated_to_exactly_the_rank_that_has_not_answered(
    ledger: Ledger, aborts: Aborts
) -> None:
    begin(aborts)
    ledger.take_effects()
    ack(aborts, 2)
    aborts.repeat(key())

    assert [OTHER_PEER] == asked(ledger)


def test_repeating_slows_down_under_one_total_clock(ledger: Ledger, aborts: Aborts) -> None:
    begin(aborts)
    pauses = []
    for _ in range(3):
        when = ledger.deadlines.next()
        assert when is not None
        pauses.append(round(when - ledger.now, 6))
        ledger.now = when
        assert [(Clock.REPEAT, key())] == ledger.deadlines.due(when)
        aborts.repeat(key())

    assert [0.2, 0.4, 0.5] == pauses
    assert ledger.deadlines.due(30.0)[-1] == (Clock.ABORT, key())


@pytest.mark.parametrize(
    ("rank", "incarnation", "changes"),
    [
        (2, "other", {}),
        (2, "", {}),
        (2, "i", {"generation": 0}),
        (2, "i", {"generation": 2}),
        (2, "i", {"generation": None}),
    ],
)
def test_an_answer_to_another_question_or_of_another_life_proves_nothing(
    ledger: Ledger, aborts: Aborts, rank: int, incarnation: str, changes: dict[str, Any]
) -> None:
    begin(aborts)
    ack(aborts, 1)
    ledger.take_effects()

    assert not ack(aborts, rank, incarnation, **changes)
    assert [Count("abort_ack_stale")] == ledger.take_effects()


def test_an_answer_of_a_rank_that_was_not_asked_proves_nothing(aborts: Aborts) -> None:
    begin(aborts)

    assert not ack(aborts, 0)
    assert not ack(aborts, 7)
    # An answer to another of our ranks is not the one that this rank waits for.
    assert not ack(aborts, 2, to=1)
    assert not ack(aborts, 1)


def test_a_second_cancel_needs_new_answers(aborts: Aborts) -> None:
    begin(aborts)
    ack(aborts, 1)
    begin(aborts)

    assert not ack(aborts, 1)
    assert not ack(aborts, 1, generation=2)
    assert ack(aborts, 2, generation=2)


def test_one_rank_that_did_not_drain_makes_a_fence_necessary(
    ledger: Ledger, aborts: Aborts
) -> None:
    begin(aborts)
    assert not ack(aborts, 1, drained=False)
    assert (0, None) == ledger.pool.waiting_for_fence()
    assert not ack(aborts, 2)

    assert (1, 0.0) == ledger.pool.waiting_for_fence()
    assert (1, 0.0) == ledger.slots.waiting_for_fence()
    assert ledger.deadlines.next() is None
    assert 1 == len(aborts)


def test_of_a_writer_that_is_not_trusted_the_answer_makes_a_fence_necessary(
    ledger: Ledger, aborts: Aborts
) -> None:
    aborts.begin(key(), waiting=WAITING, incarnation="i", provable=True, trusted=False)
    assert [PEER, OTHER_PEER] == asked(ledger)
    assert not ack(aborts, 1)
    assert not ack(aborts, 2)

    assert (1, 0.0) == ledger.pool.waiting_for_fence()
    assert (1, 0.0) == ledger.slots.waiting_for_fence()


def test_without_hope_of_an_answer_nobody_is_asked(ledger: Ledger, aborts: Aborts) -> None:
    begin(aborts, provable=False)

    assert [] == asked(ledger)
    assert [(Clock.ABORT, key())] == ledger.deadlines.due(30.0)


def test_the_end_stops_its_clocks(ledger: Ledger, aborts: Aborts) -> None:
    begin(aborts)
    aborts.end(key())
    aborts.end(key())
    ledger.take_effects()
    aborts.repeat(key())

    assert 0 == len(aborts)
    assert ledger.deadlines.next() is None
    assert [] == ledger.take_effects()
    assert not ack(aborts, 1)


def test_before_anything_was_published_prefill_is_told_and_not_asked(
    ledger: Ledger, aborts: Aborts
) -> None:
    aborts.tell(key(), WAITING.values())

    assert [(PEER, Abort(key(), HERE)), (OTHER_PEER, Abort(key(), HERE))] == sent(
        ledger.take_effects()
    )
    assert 0 == len(aborts)
