"""A page is free, owned or quarantined, and leaves quarantine by proof only."""

from __future__ import annotations

import pytest

from pdcluster_protocol.errors import InvariantViolated
from pdcluster_protocol.pages import RUNS_SHOWN_MAX, PagePool, page_runs
from support.ledgers import key


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.free_count, pool.owned_count, pool.quarantined_count


def test_reserve_gives_all_or_nothing() -> None:
    pool = PagePool(4)

    assert (0, 1, 2) == pool.reserve(key(1), 3)
    assert pool.reserve(key(2), 2) is None
    assert (1, 3, 0) == counts(pool)
    assert not pool.holds(key(2))


def test_the_pages_of_a_key_are_told_in_the_order_of_its_tokens_as_runs() -> None:
    pool = PagePool(8)
    pool.reserve(key(1), 5)

    assert (0, 1, 2, 3, 4) == pool.pages_of(key(1))
    assert () == pool.pages_of(key(2))
    assert "0-4" == page_runs(pool.pages_of(key(1)))
    assert "3-7 12 2-3" == page_runs((3, 4, 5, 6, 7, 12, 2, 3))
    assert "" == page_runs(())
    assert page_runs(tuple(range(0, 2 * RUNS_SHOWN_MAX + 2, 2))).endswith(" 254 ...")


def test_a_key_reserves_once() -> None:
    pool = PagePool(4)
    pool.reserve(key(1), 1)

    with pytest.raises(InvariantViolated, match="reserves its pages once"):
        pool.reserve(key(1), 1)


def test_the_longest_run_is_handed_out_first_and_neighbours_are_joined_again() -> None:
    pool = PagePool(10)
    for room, count in ((1, 2), (2, 3), (3, 5)):
        pool.reserve(key(room), count)
    pool.release(key(1))
    pool.release(key(3))

    assert (5, 6) == pool.reserve(key(4), 2)
    pool.release(key(2))
    assert (0, 1, 2, 3, 4, 7) == pool.reserve(key(5), 6)


def test_quarantined_pages_leave_by_proof_only() -> None:
    pool = PagePool(4)
    pool.reserve(key(1), 3)
    pool.quarantine(key(1), 5.0)

    assert (1, 0, 3) == counts(pool)
    with pytest.raises(InvariantViolated, match="by proof only"):
        pool.release(key(1))
    assert pool.reserve(key(2), 2) is None
    pool.absolve(key(1))
    assert (4, 0, 0) == counts(pool)


def test_proof_frees_nothing_that_is_in_use() -> None:
    pool = PagePool(4)
    pool.reserve(key(1), 3)
    pool.absolve(key(1))

    assert [] == pool.absolve_fenced()
    assert (1, 3, 0) == counts(pool)


def test_a_fence_frees_every_quarantined_key_and_no_other() -> None:
    pool = PagePool(6)
    for room in (1, 2, 3):
        pool.reserve(key(room), 2)
    pool.quarantine(key(1), 1.0)
    pool.quarantine(key(3), 2.0, needs_fence=True)

    assert [key(1), key(3)] == pool.absolve_fenced()
    assert (4, 2, 0) == counts(pool)


def test_only_what_no_acknowledgement_can_free_waits_for_a_fence() -> None:
    pool = PagePool(6)
    for room in (1, 2):
        pool.reserve(key(room), room)
        pool.quarantine(key(room), float(room))
    assert (0, None) == pool.waiting_for_fence()

    pool.quarantine(key(2), 9.0, needs_fence=True)
    assert (2, 2.0) == pool.waiting_for_fence()
    pool.quarantine(key(2), 9.0)
    assert (2, 2.0) == pool.waiting_for_fence()


def test_unknown_keys_are_normal_input() -> None:
    pool = PagePool(2)
    pool.release(key(1))
    pool.quarantine(key(1), 0.0)
    pool.absolve(key(1))

    assert (2, 0, 0) == counts(pool)


def test_scattered_pages_are_a_permutation_repeated_by_its_seed() -> None:
    first, again, other = (PagePool(64, scatter_seed=s).reserve(key(1), 64) for s in (1, 1, 2))

    assert first == again
    assert first != other
    assert list(range(64)) == sorted(first or ())
    assert sum(b == a + 1 for a, b in zip(first or (), (first or ())[1:], strict=False)) < 8


def test_every_reservation_has_its_own_epoch() -> None:
    pool = PagePool(4)
    pool.reserve(key(1), 1)
    first = pool.epoch
    pool.reserve(key(2), 9)
    assert first == pool.epoch
    pool.reserve(key(2), 1)
    assert first < pool.epoch


def test_check_finds_a_page_in_two_places_and_a_lost_one() -> None:
    twice = PagePool(4)
    twice.reserve(key(1), 2)
    twice._extents = [(1, 3)]
    with pytest.raises(InvariantViolated, match=r"held twice: \[1\], lost: \[\]"):
        twice.check()

    lost = PagePool(4)
    lost._extents = [(0, 3)]
    with pytest.raises(InvariantViolated, match=r"held twice: \[\], lost: \[3\]"):
        lost.check()

    miscounted = PagePool(4)
    miscounted.free_count = 3
    with pytest.raises(InvariantViolated, match="4 pages are free, 3 are counted"):
        miscounted.check()
