"""Requests that one engine computes alone: each leg has one end, and its pages come back."""

from __future__ import annotations

import pytest

from pdcluster_protocol.alone import AloneRooms, AloneState
from pdcluster_protocol.effects import ConcludeLeg, StartAlone, StopCompute
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ledger import Clock, Ledger
from support.ledgers import joined_ledger, key


def arrive(rooms: AloneRooms, room: int = 1, *, tokens: int = 10) -> None:
    rooms.leg_arrived(LegArrived(key(room), f"rid-{room}", tokens, "", 2, None))


def admit(ledger: Ledger, rooms: AloneRooms) -> None:
    grant = ledger.queue.admit()
    assert grant is not None
    rooms.granted(grant)


@pytest.fixture
def ledger() -> Ledger:
    return joined_ledger()


@pytest.fixture
def rooms(ledger: Ledger) -> AloneRooms:
    return AloneRooms(ledger)


def test_prompt_and_answer_are_reserved_then_computed(ledger: Ledger, rooms: AloneRooms) -> None:
    arrive(rooms)
    assert [] == ledger.take_effects()
    admit(ledger, rooms)

    assert [StartAlone(key(), (0, 1, 2))] == ledger.take_effects()
    assert ledger.deadlines.next() is None


def test_the_last_token_ends_the_leg_and_frees_the_pages(ledger: Ledger, rooms: AloneRooms) -> None:
    arrive(rooms)
    admit(ledger, rooms)
    ledger.take_effects()
    rooms.finished(key())
    rooms.finished(key())

    assert [ConcludeLeg(key(), None)] == ledger.take_effects()
    assert 16 == ledger.pool.free_count
    assert {} == rooms.rooms


def test_a_cancel_in_the_queue_ends_at_once(ledger: Ledger, rooms: AloneRooms) -> None:
    arrive(rooms)
    rooms.cancel(key(), Reason.CLIENT_GONE, "left")

    assert [ConcludeLeg(key(), Reason.CLIENT_GONE, "left")] == ledger.take_effects()
    assert 0 == len(ledger.queue)
    assert ledger.deadlines.next() is None
    assert {} == rooms.rooms


def test_after_a_cancel_the_pages_stay_until_the_model_has_let_go(
    ledger: Ledger, rooms: AloneRooms
) -> None:
    arrive(rooms)
    admit(ledger, rooms)
    ledger.take_effects()
    rooms.cancel(key(), Reason.CLIENT_GONE, "left")
    rooms.cancel(key(), Reason.ABORTED, "again")

    expected = [ConcludeLeg(key(), Reason.CLIENT_GONE, "left"), StopCompute(key())]
    assert expected == ledger.take_effects()
    assert 13 == ledger.pool.free_count
    rooms.stopped(key(), None, "")
    assert [] == ledger.take_effects()
    assert 16 == ledger.pool.free_count


def test_an_answer_that_crosses_a_cancel_lets_go_without_a_second_end(
    ledger: Ledger, rooms: AloneRooms
) -> None:
    arrive(rooms)
    admit(ledger, rooms)
    rooms.cancel(key(), Reason.CLIENT_GONE, "left")
    ledger.take_effects()
    rooms.finished(key())

    assert [] == ledger.take_effects()
    assert 16 == ledger.pool.free_count


@pytest.mark.parametrize(
    ("reason", "expected"), [(None, Reason.MODEL_FAILED), (Reason.TOO_LARGE, Reason.TOO_LARGE)]
)
def test_a_failure_of_the_model_is_the_end_of_the_leg(
    ledger: Ledger, rooms: AloneRooms, reason: Reason | None, expected: Reason
) -> None:
    arrive(rooms)
    admit(ledger, rooms)
    ledger.take_effects()
    rooms.stopped(key(), reason, "NaN")

    assert ConcludeLeg(key(), expected, "NaN") == ledger.take_effects()[0]
    assert 16 == ledger.pool.free_count
    assert "Failed" == ledger.stories.of(key())[-1].after


def test_who_waits_too_long_for_pages_is_told_which_clock_ran_out(
    ledger: Ledger, rooms: AloneRooms
) -> None:
    arrive(rooms, 1, tokens=60)
    admit(ledger, rooms)
    arrive(rooms, 2)
    ledger.take_effects()
    assert ledger.queue.admit() is None
    ledger.now = 300.0
    for clock, name in ledger.deadlines.due(ledger.now):
        rooms.due(clock, name)

    (end,) = ledger.take_effects()
    assert isinstance(end, ConcludeLeg)
    assert (key(2), Reason.BOOTSTRAP_TIMEOUT) == (end.key, end.reason)
    assert [AloneState.RUNNING] == [room.state for room in rooms.rooms.values()]


def test_unknown_keys_are_normal_input(ledger: Ledger, rooms: AloneRooms) -> None:
    rooms.cancel(key(), Reason.ABORTED, "")
    rooms.finished(key())
    rooms.stopped(key(), None, "")
    rooms.due(Clock.BOOTSTRAP, key())

    assert [] == ledger.take_effects()
