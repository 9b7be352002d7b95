"""Named deadlines: the dictionary is the truth, the heap only an order."""

from __future__ import annotations

import random

import pytest

from pdcluster_protocol.deadlines import Deadlines


def test_nothing_is_due_when_nothing_is_set() -> None:
    deadlines: Deadlines[str] = Deadlines()

    assert deadlines.next() is None
    assert [] == deadlines.due(1e9)
    assert 0 == len(deadlines)


def test_they_come_earliest_first_and_once_and_at_their_very_time() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for name, when in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        deadlines.set(name, when)

    assert ["a", "b"] == deadlines.due(2.0)
    assert 3.0 == deadlines.next()
    assert [] == deadlines.due(2.999)
    assert ["c"] == deadlines.due(3.0)
    assert [] == deadlines.due(3.0)


def test_the_last_setting_counts() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)

    assert [] == deadlines.due(4.0)
    deadlines.set("a", 1.0)
    assert ["a"] == deadlines.due(4.0)
    assert [] == deadlines.due(9.0)


def test_a_cleared_one_does_not_come_even_when_set_again_to_the_same_time() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.clear("a")
    deadlines.clear("unknown")
    assert deadlines.next() is None

    deadlines.set("a", 1.0)
    assert ["a"] == deadlines.due(1.0)
    assert [] == deadlines.due(1.0)


def test_a_deadline_that_moves_forever_does_not_grow_the_heap() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for moment in range(10_000):
        deadlines.set("stall", float(moment))

    assert len(deadlines._heap) <= 64 + 4 + 1
    assert ["stall"] == deadlines.due(9_999.0)


@pytest.mark.parametrize("seed", [20261201])
def test_whatever_is_set_moved_and_cleared_comes_when_a_plain_table_says(seed: int) -> None:
    dice = random.Random(seed)
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    now = 0.0
    for _ in range(20_000):
        name = dice.randrange(8)
        match dice.randrange(4):
            case 0 | 1:
                plain[name] = now + dice.randrange(6)
                deadlines.set(name, plain[name])
            case 2:
                plain.pop(name, None)
                deadlines.clear(name)
            case _:
                now += dice.randrange(3)
                due = {each for each, when in plain.items() if when <= now}
                assert due == set(deadlines.due(now))
                plain = {each: when for each, when in plain.items() if each not in due}
        assert min(plain.values(), default=None) == deadlines.next()
        assert set(plain) == set(deadlines.names())


def test_the_order_of_equal_times_never_compares_names() -> None:
    deadlines: Deadlines[object] = Deadlines()
    names = [object() for _ in range(200)]
    for name in names * 3:
        deadlines.set(name, 1.0)

    assert set(names) == set(deadlines.due(1.0))
