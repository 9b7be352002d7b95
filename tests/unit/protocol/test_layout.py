"""Addresses, sizes and agreement of two layouts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import LayoutMismatch
from pdcluster_protocol.layout import REGION_ALIGNMENT_BYTES, KVLayout, Region, token_digest
from support.ledgers import LAYOUT

layouts = st.builds(
    KVLayout,
    st.integers(1, 128),
    st.just("bfloat16"),
    st.lists(
        st.builds(
            Region, st.integers(0, 3), st.sampled_from(["key", "value"]), st.integers(1, 999)
        ),
        min_size=1,
        max_size=5,
    ).map(tuple),
)


@given(layouts, st.integers(1, 50))
def test_no_two_pages_share_a_byte_and_all_lie_inside_the_arena(
    layout: KVLayout, page_count: int
) -> None:
    ends = 0
    for region in range(len(layout.regions)):
        assert 0 == layout.region_offset(region, page_count) % REGION_ALIGNMENT_BYTES
        for page in range(page_count):
            start = layout.page_offset(region, page, page_count)
            assert start >= ends
            ends = start + layout.item_bytes(region)
    assert ends <= layout.arena_bytes(page_count)
    assert layout.arena_bytes(page_count) - ends < REGION_ALIGNMENT_BYTES


@given(st.integers(1, 128), st.integers(0, 10_000))
def test_pages_hold_the_tokens_and_one_page_less_does_not(page_size: int, tokens: int) -> None:
    pages = KVLayout(page_size, "float32", ()).pages_for(tokens)

    assert pages * page_size >= tokens
    assert pages == 0 or (pages - 1) * page_size < tokens


def test_the_bytes_of_a_token_are_those_of_all_regions() -> None:
    assert 6 + 2 + 3 == LAYOUT.bytes_per_token
    assert [24, 8, 12] == [LAYOUT.item_bytes(i) for i in range(3)]


def test_equal_layouts_agree_in_digest_and_field_by_field() -> None:
    same = msgspec.json.decode(msgspec.json.encode(LAYOUT), type=KVLayout)

    LAYOUT.require_compatible(same)
    assert same.digest() == LAYOUT.digest()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"page_size": 8}, "page_size: ours is 4, the peer's is 8"),
        ({"dtype": "fp8"}, "dtype: ours is 'float32', the peer's is 'fp8'"),
        ({"regions": LAYOUT.regions[:2]}, "regions: ours are 3, the peer's are 2"),
        ({"regions": LAYOUT.regions[::-1]}, r"region 0\.latent"),
        (
            {"regions": (*LAYOUT.regions[:2], Region(1, "indexer", 3, heads=2))},
            r"region 1\.indexer: ours is .*heads=1.* the peer's is .*heads=2",
        ),
        (
            {"regions": (Region(0, "latent", 7), *LAYOUT.regions[1:])},
            r"region 0\.latent: .*bytes_per_token=6.*bytes_per_token=7",
        ),
    ],
)
def test_a_difference_is_named_with_both_values(changes: dict[str, object], what: str) -> None:
    other = msgspec.structs.replace(LAYOUT, **changes)

    with pytest.raises(LayoutMismatch, match=what):
        LAYOUT.require_compatible(other)
    assert LAYOUT.digest() != other.digest()


@given(st.lists(st.integers(0, 200_000), max_size=8), st.lists(st.integers(0, 200_000), max_size=8))
def test_two_prompts_have_one_digest_only_if_they_are_one(
    first: list[int], second: list[int]
) -> None:
    assert (token_digest(first) == token_digest(second)) is (first == second)
    assert token_digest(first) == token_digest(tuple(first))
