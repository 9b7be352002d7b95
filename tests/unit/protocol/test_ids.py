"""Rooms, attempts and keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.ids import (
    ATTEMPT_MAX,
    ROOM_MAX,
    Key,
    RankAddress,
    attempt_milliseconds,
    mint_attempt,
    mint_room,
)

sizes_and_ranks = st.integers(1, 4096).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(0, size - 1))
)


@given(st.integers(0, (1 << 64) - 1), sizes_and_ranks)
def test_a_room_is_in_range_and_belongs_to_its_rank(entropy: int, place: tuple[int, int]) -> None:
    size, rank = place
    room = mint_room(entropy, dp_size=size, dp_rank=rank)

    assert 1 <= room <= ROOM_MAX
    assert rank == room % size


@pytest.mark.parametrize("entropy", [0, 1, ROOM_MAX - 1, ROOM_MAX, (1 << 64) - 1])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2), (64, 63)])
def test_the_ends_of_the_range_make_no_exception(entropy: int, size: int, rank: int) -> None:
    room = mint_room(entropy, dp_size=size, dp_rank=rank)

    assert 1 <= room <= ROOM_MAX
    assert rank == room % size


def test_room_zero_is_never_minted_since_it_means_not_written() -> None:
    assert 1 == mint_room(0, dp_size=1, dp_rank=0)
    assert 8 == mint_room(3, dp_size=8, dp_rank=0)


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (2, -1), (0, 0), (4, 7)])
def test_a_rank_outside_its_size_is_refused_with_both_values(size: int, rank: int) -> None:
    with pytest.raises(ValueError, match=rf"dp_rank {rank} is not in \[0, {size}\)"):
        mint_room(1, dp_size=size, dp_rank=rank)


@given(st.integers(0, (1 << 42) - 1), st.integers(0))
def test_an_attempt_keeps_its_milliseconds_and_fits_64_bits(moment: int, entropy: int) -> None:
    attempt = mint_attempt(moment, entropy)

    assert 0 <= attempt <= ATTEMPT_MAX
    assert moment == attempt_milliseconds(attempt)


@given(st.integers(0, (1 << 42) - 2), st.integers(0), st.integers(0))
def test_a_later_attempt_is_a_larger_number(moment: int, first: int, second: int) -> None:
    assert mint_attempt(moment, first) < mint_attempt(moment + 1, second)


def test_names_are_short_enough_to_read_aloud() -> None:
    assert "7.9" == str(Key(7, 9))
    assert "10.0.0.1:9000" == str(RankAddress("10.0.0.1", 9000))


def test_keys_of_one_room_differ_by_attempt() -> None:
    assert Key(7, 1) != Key(7, 2)
    assert {Key(7, 1)} == {Key(7, 1), Key(7, 1)}
