"""Connections make room for each other, the longest idle first, and never while being answered."""

from __future__ import annotations

from pdcluster_protocol.callers import CLOSED_KEPT_MAX, Callers


class Switchboard:
    """Connections are numbers; those in `open_now` are open."""

    def __init__(self, bound: int) -> None:
        self.open_now: list[int] = []
        self.callers: Callers[int] = Callers(self._close, connections_max=bound)

    def come(self, connection: int) -> bool:
        if not self.callers.make_room(self.open_now):
            return False
        self.open_now.append(connection)
        self.callers.came(connection)
        return True

    def _close(self, connection: int) -> bool:
        if connection not in self.open_now:
            return False
        self.open_now.remove(connection)
        return True


def test_over_the_bound_the_longest_idle_goes() -> None:
    board = Switchboard(3)

    assert all(board.come(number) for number in range(5))
    assert [2, 3, 4] == board.open_now
    assert (2, 0) == (board.callers.closed, board.callers.refused)


def test_an_answer_makes_a_connection_young_again() -> None:
    board = Switchboard(3)
    for number in range(3):
        board.come(number)
    board.callers.asked(0)
    board.callers.answered(0)
    board.callers.answered(1)

    board.come(3)
    assert [0, 1, 3] == board.open_now


def test_who_is_being_answered_is_not_closed_and_the_newcomer_is_refused() -> None:
    board = Switchboard(2)
    for number in range(2):
        board.come(number)
        board.callers.asked(number)

    assert not board.come(2)
    assert ([0, 1], 1) == (board.open_now, board.callers.refused)
    board.callers.answered(0)
    assert board.come(3)
    assert [1, 3] == board.open_now


def test_those_that_left_by_themselves_are_neither_counted_nor_kept() -> None:
    board = Switchboard(2)
    for number in range(4 * CLOSED_KEPT_MAX):
        board.come(number)
        board.open_now.remove(number)

    assert 0 == board.callers.closed
    assert len(board.callers._idle) <= CLOSED_KEPT_MAX + 2
