"""The registry against a naive model: readiness is a complete set of distinct coordinates."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.push.registry import RegistryNode

SIZES = {"attn_tp_size": 2, "attn_cp_size": 1, "pp_size": 2, "attn_dp_size": 2}
PLACES = list(itertools.product(range(2), range(1), range(2), range(2)))
NAMES = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


def body(place: tuple[int, ...], port: int) -> bytes:
    dp, cp, tp, pp = place
    ranks = {"attn_dp_rank": dp, "attn_cp_rank": cp, "attn_tp_rank": tp, "pp_rank": pp}
    return msgspec.json.encode(
        SIZES
        | ranks
        | {"system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "::1", "rank_port": port}
        | {"page_size": 64, "kv_cache_dtype": "bfloat16"}
    )


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.integers(1, 65535)), max_size=24))
def test_any_order_of_registrations_gives_the_model(
    puts: list[tuple[tuple[int, ...], int]],
) -> None:
    registry = RegistryNode()
    model: dict[tuple[int, ...], int] = {}
    for place, port in puts:
        assert 200 == registry.put_route(body(place, port)).status
        model[place] = port

        assert len(model) == registry.registered
        assert (len(model) == len(PLACES)) == registry.ready
    for place in PLACES:
        asked = {name: str(value) for name, value in zip(NAMES, place, strict=True)}
        answer = registry.get_route(asked)
        if registry.ready:
            found = msgspec.json.decode(answer.text)
            assert {"rank_ip": "::1", "rank_port": model[place]} == found
        else:
            assert 503 == answer.status


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=20), st.text(max_size=9)))
def test_no_input_raises(raw: bytes, query: dict[str, str]) -> None:
    registry = RegistryNode()

    assert 400 == registry.put_route(raw).status
    assert registry.get_route(query).status in {400, 503}
    assert registry.register_dp_rank(raw, 0.0).status in {200, 400}
    assert registry.query_dp_ranks(raw, 0.0).status in {200, 400}
