"""The last word after a bad end is repeated, slower and slower, and not for ever."""

from __future__ import annotations

import pytest

from pdcluster_protocol.effects import Count
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import KVPoll, Status
from pdcluster_protocol.push.farewells import DETAIL_LENGTH_MAX, REPEATS_MAX, Farewells
from support.ledgers import HERE, LANE, OTHER_LANE, OTHER_PEER, PEER, joined_ledger, key, sent


@pytest.fixture
def ledger() -> Ledger:
    return joined_ledger(
        limits=Limits(rooms_max=2, retransmit_seconds_min=0.2, retransmit_seconds_max=1.0)
    )


@pytest.fixture
def farewells(ledger: Ledger) -> Farewells:
    return Farewells(ledger)


def heard(ledger: Ledger) -> list[tuple[RankAddress, Key]]:
    messages = sent(ledger.take_effects())
    return [(to, message.key) for to, message in messages if isinstance(message, Status)]


def test_every_target_hears_the_true_cause(ledger: Ledger, farewells: Farewells) -> None:
    farewells.say(key(), (LANE, OTHER_LANE), reason="Stalled", detail="x" * 9999)

    expected = Status(
        key(),
        KVPoll.FAILED,
        0,
        reason="Stalled",
        detail="x" * DETAIL_LENGTH_MAX,
        reply_to=HERE,
    )
    assert [(PEER, expected), (OTHER_PEER, expected)] == sent(ledger.take_effects())


def test_it_is_repeated_ever_more_slowly_and_then_given_up(
    ledger: Ledger, farewells: Farewells
) -> None:
    farewells.say(key(), (LANE,), reason="Stalled", detail="")
    pauses = []
    while (when := ledger.deadlines.next()) is not None:
        pauses.append(round(when - ledger.now, 6))
        ledger.now = when
        for _, name in ledger.deadlines.due(when):
            farewells.due(name)
    effects = ledger.take_effects()

    assert [0.2, 0.4, 0.8] + [1.0] * (REPEATS_MAX - 2) == pauses
    assert 1 + REPEATS_MAX == len(sent(effects))
    assert Count("farewell_unheard") == effects[-1]
    assert 0 == len(farewells)


def test_it_ends_when_it_is_taken(ledger: Ledger, farewells: Farewells) -> None:
    farewells.say(key(), (LANE,), reason="Stalled", detail="")
    ledger.take_effects()
    farewells.stop(key())
    farewells.stop(key())
    farewells.due(key())

    assert [] == ledger.take_effects()
    assert ledger.deadlines.next() is None
    assert 0 == len(farewells)


def test_saying_it_anew_starts_anew(ledger: Ledger, farewells: Farewells) -> None:
    farewells.say(key(), (LANE,), reason="Stalled", detail="")
    farewells.due(key())
    farewells.say(key(), (OTHER_LANE,), reason="Stalled", detail="")

    assert [(PEER, key()), (PEER, key()), (OTHER_PEER, key())] == heard(ledger)
    assert 0.2 == ledger.deadlines.next()
    assert 1 == len(farewells)


def test_they_are_bounded_and_the_oldest_goes_first(ledger: Ledger, farewells: Farewells) -> None:
    for room in (1, 2, 3):
        farewells.say(key(room), (LANE,), reason="Stalled", detail="")
    ledger.take_effects()

    assert 2 == len(farewells)
    due = [name for _, name in ledger.deadlines.due(9.0)]
    assert [key(2), key(3)] == due
