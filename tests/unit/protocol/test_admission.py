"""First come, first served, all or nothing."""

from __future__ import annotations

import pytest

from pdcluster_protocol.admission import AdmissionQueue, Grant, Need, input_tokens_max
from pdcluster_protocol.pages import PagePool
from support.ledgers import key


def queue(pages: int = 8, slots: int = 2) -> tuple[AdmissionQueue, PagePool, PagePool]:
    pool, slot_pool = PagePool(pages), PagePool(slots)
    return AdmissionQueue(pool, slot_pool), pool, slot_pool


def admitted(line: AdmissionQueue) -> object:
    grant = line.admit()
    return None if grant is None else grant.key


def test_nobody_overtakes_a_large_request_that_waits() -> None:
    line, pool, _ = queue()
    for room, pages in ((1, 6), (2, 7), (3, 1)):
        line.add(key(room), Need(pages, slot=False))

    assert Grant(key(1), (0, 1, 2, 3, 4, 5), None) == line.admit()
    assert line.admit() is None
    assert Need(7, slot=False) == line.head()
    pool.release(key(1))
    assert key(2) == admitted(line)
    assert key(3) == admitted(line)
    assert line.admit() is None
    assert 0 == len(line)


def test_a_missing_slot_is_back_pressure_and_takes_no_page() -> None:
    line, pool, slots = queue(slots=1)
    for room in (1, 2):
        line.add(key(room), Need(1, slot=True))

    first = line.admit()
    assert first is not None
    assert 0 == first.slot
    assert line.admit() is None
    assert 7 == pool.free_count
    slots.release(key(1))
    assert key(2) == admitted(line)


def test_missing_pages_take_no_slot() -> None:
    line, pool, slots = queue(pages=2)
    line.add(key(1), Need(3, slot=True))

    assert line.admit() is None
    assert (2, 2) == (pool.free_count, slots.free_count)


def test_a_request_that_leaves_lets_the_next_one_in() -> None:
    line, _, _ = queue()
    line.add(key(1), Need(9, slot=False))
    line.add(key(2), Need(1, slot=False))
    line.remove(key(1))
    line.remove(key(9))

    assert key(1) not in line
    assert key(2) in line
    assert key(2) == admitted(line)
    assert line.head() is None


@pytest.mark.parametrize(
    ("capacity", "shards", "expected"),
    [(4096, 1, 4096), (4096, 2, 3904), (4096, 8, 3520), (64 * 3, 2, 0)],
)
def test_the_longest_prompt_is_the_one_that_sglang_computes(
    capacity: int, shards: int, expected: int
) -> None:
    assert expected == input_tokens_max(capacity, shards=shards, page_size=64)
