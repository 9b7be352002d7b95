"""A window of counters is held to a set of all counters that were taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import Unauthorized
from pdcluster_protocol.replays import ReplayWindow


@given(
    size=st.integers(1, 70),
    moves=st.lists(st.one_of(st.integers(-80, 20), st.integers(60, 200)), max_size=60),
)
def test_a_window_takes_each_counter_once_and_none_behind_it(size: int, moves: list[int]) -> None:
    window = ReplayWindow(size)
    taken: set[int] = set()
    for move in moves:
        newest = max(taken, default=0)
        counter = max(1, newest + move)
        fresh = counter not in taken and newest - counter < size
        try:
            window.accept(counter)
        except Unauthorized:
            assert not fresh
        else:
            assert fresh
            taken.add(counter)
