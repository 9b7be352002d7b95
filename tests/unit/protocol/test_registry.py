"""The registry: SGLang's contract, and the accidents that it no longer has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_protocol.errors import RankConflict
from pdcluster_protocol.push.registration import parse_registration
from pdcluster_protocol.push.registry import ROOM_SECONDS, RegistryNode
from support.plain_ranks import plain_row


def body(**changes: Any) -> bytes:
    row = plain_row(attn_tp_size=2) | changes
    return msgspec.json.encode({name: value for name, value in row.items() if value != "absent"})


def query(dp: object = 0, cp: object = 0, tp: object = 0, pp: object = 0) -> dict[str, str]:
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    return {name: str(value) for name, value in zip(names, (dp, cp, tp, pp), strict=True)}


ALL = query(-1, -1, -1, -1)


def complete(**changes: Any) -> RegistryNode:
    registry = RegistryNode()
    for rank in (0, 1):
        answer = registry.put_route(body(attn_tp_rank=rank, rank_port=9000 + rank, **changes))
        assert (200, "OK") == (answer.status, answer.text)
    return registry


def test_it_is_not_ready_before_every_rank_is_there() -> None:
    registry = RegistryNode()
    assert 503 == registry.get_route(ALL).status
    registry.put_route(body())

    answer = registry.get_route(query())
    assert 503 == answer.status
    assert "1 of 2" in answer.text


def test_a_rank_that_registers_twice_does_not_stand_in_for_another() -> None:
    registry = RegistryNode()
    for _ in range(8):
        registry.put_route(body())

    assert 1 == registry.registered
    assert 503 == registry.get_route(query()).status


def test_server_information_has_only_keys_that_the_decoder_knows() -> None:
    answer = complete(prefill_http_port=30000).get_route(ALL)

    assert answer.json
    assert {
        "attn_tp_size": 2,
        "attn_cp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "page_size": 64,
        "kv_cache_dtype": "bfloat16",
        "follow_bootstrap_room": True,
        "enable_dsa_cache_layer_split": False,
        "enable_kv_cache_sharding": False,
        "decode_allocation_policy": "early",
        "prefill_http_port": 30000,
    } == msgspec.json.decode(answer.text)


def test_a_kv_layout_is_told_when_somebody_said_it() -> None:
    registry = RegistryNode()
    registry.put_route(body(attn_tp_rank=0))
    registry.put_route(body(attn_tp_rank=1, kv_layout="nhd"))

    assert "nhd" == msgspec.json.decode(registry.get_route(ALL).text)["kv_layout"]


def test_a_rank_is_found_by_its_coordinates() -> None:
    answer = complete().get_route(query(tp=1))

    assert {"rank_ip": "127.0.0.1", "rank_port": 9001} == msgspec.json.decode(answer.text)


def test_unknown_coordinates_are_404() -> None:
    assert 404 == complete().get_route(query(tp=2)).status
    assert 404 == complete().get_route(query(dp=-1)).status


def test_registering_again_replaces_the_address() -> None:
    registry = complete()
    registry.put_route(body(attn_tp_rank=1, rank_port=9555))

    assert 9555 == msgspec.json.decode(registry.get_route(query(tp=1)).text)["rank_port"]


def test_data_parallel_ranks_are_counted_by_either_size() -> None:
    registry = RegistryNode()
    for rank in (0, 1):
        registry.put_route(body(attn_tp_size=1, system_dp_size=2, system_dp_rank=rank))

    assert registry.ready
    assert 2 == msgspec.json.decode(registry.get_route(ALL).text)["dp_size"]
    assert 200 == registry.get_route(query(dp=1)).status


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 128},
        {"kv_cache_dtype": "fp8"},
        {"attn_tp_size": 4},
        {"pp_size": 2},
        {"attn_dp_size": 2},
        {"load_balance_method": "round_robin"},
        {"dsv41_spec_layout": {"num_draft_tokens": 1}},
        {"enable_kv_cache_sharding": True},
    ],
)
def test_a_rank_that_disagrees_about_bytes_is_refused_with_both_values(
    changes: dict[str, Any],
) -> None:
    registry = RegistryNode()
    registry.put_route(body())

    answer = registry.put_route(body(attn_tp_rank=1, **changes))
    assert 400 == answer.status
    assert "registered ranks have" in answer.text
    assert 1 == registry.registered


def test_a_rank_of_another_policy_is_refused() -> None:
    registry = RegistryNode()
    registry.put_route(body())

    answer = registry.put_route(body(attn_tp_rank=1, decode_allocation_policy="prefill_complete"))
    assert 400 == answer.status
    assert "inconsistent policies" in answer.text


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "registration"),
        (b"{", "registration"),
        (b"[]", "registration"),
        (b"\xff\xfe", "registration"),
        (body(rank_ip="absent"), "rank_ip"),
        (body(rank_port="9000"), "rank_port"),
        (body(rank_port=0), "rank_port"),
        (body(attn_tp_rank=2), "attn_tp_rank"),
        (body(attn_tp_rank=-1), "attn_tp_rank"),
        (body(page_size=None), "page_size"),
        (body(page_size=0), "page_size"),
        (body(rank_ip="a b"), "rank_ip"),
        (body(rank_ip="http://x/"), "rank_ip"),
        (body(attn_tp_size=8000, attn_cp_size=8000), "ranks"),
        (body(kv_cache_dtype="x" * 65), "kv_cache_dtype"),
        (body(prefill_http_port=70000), "prefill_http_port"),
    ],
)
def test_a_malformed_registration_is_400_by_field(raw: bytes, what: str) -> None:
    answer = RegistryNode().put_route(raw)

    assert 400 == answer.status
    assert what in answer.text


@pytest.mark.parametrize("wrong", ["", "x", "1.0", "--1", "٣", "1" * 20])
def test_a_malformed_coordinate_is_400_by_name(wrong: str) -> None:
    answer = complete().get_route(query(tp=wrong))

    assert 400 == answer.status
    assert "target_tp_rank" in answer.text


def test_a_missing_coordinate_is_400_even_while_not_ready() -> None:
    assert 400 == RegistryNode().get_route({"prefill_dp_rank": "0"}).status


def test_a_table_of_one_incarnation_takes_no_row_of_another() -> None:
    registry = RegistryNode()
    registry.begin("mine")

    assert 400 == registry.put_route(body()).status
    assert 200 == registry.put_route(body(pd_incarnation="mine")).status
    with pytest.raises(RankConflict, match="mine"):
        registry.register(parse_registration(body(attn_tp_rank=1, pd_incarnation="other")))


def test_a_dead_instance_leaves_nothing() -> None:
    registry = complete()
    registry.forget()

    assert 0 == registry.registered
    assert 503 == registry.get_route(ALL).status


def test_rooms_find_their_dp_rank_until_they_expire() -> None:
    registry = RegistryNode()
    registry.register_dp_rank(b'{"bootstrap_room": 7, "dp_rank": 1}', 0.0)

    asked = b'{"bootstrap_rooms": [7, 8]}'
    assert '{"7":1}' == registry.query_dp_ranks(asked, ROOM_SECONDS - 1).text
    assert ROOM_SECONDS == registry.deadline()
    assert "{}" == registry.query_dp_ranks(asked, ROOM_SECONDS).text
    assert registry.deadline() is None


def test_the_room_table_is_bounded_oldest_out_first() -> None:
    registry = RegistryNode(rooms_max=2)
    for room in (1, 2, 1, 3):
        registry.register_dp_rank(b'{"bootstrap_room": %d, "dp_rank": 0}' % room, 0.0)

    assert '{"1":0,"3":0}' == registry.query_dp_ranks(b'{"bootstrap_rooms": [1, 2, 3]}', 1.0).text


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b'{"bootstrap_room": "7", "dp_rank": 0}',
        b'{"bootstrap_room": 0, "dp_rank": 0}',
        b'{"bootstrap_room": 9223372036854775808, "dp_rank": 0}',
        b'{"bootstrap_room": 7, "dp_rank": -1}',
        b'{"bootstrap_room": 7, "dp_rank": 1.5}',
    ],
)
def test_a_malformed_room_is_400(raw: bytes) -> None:
    assert 400 == RegistryNode().register_dp_rank(raw, 0.0).status


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'{"bootstrap_rooms": 7}', b'{"bootstrap_rooms":["7"]}']
)
def test_a_malformed_query_is_400(raw: bytes) -> None:
    assert 400 == RegistryNode().query_dp_ranks(raw, 0.0).status


def test_a_kv_layout_binds_those_who_name_one_and_nobody_else() -> None:
    registry = RegistryNode()
    for rank, layout in enumerate((None, "nhd", None)):
        row = body(attn_tp_size=4, attn_tp_rank=rank, kv_layout=layout)
        assert 200 == registry.put_route(row).status

    other = registry.put_route(body(attn_tp_size=4, attn_tp_rank=3, kv_layout="hnd"))
    assert 400 == other.status
    assert "kv_layout" in other.text
    # The only rank that named one may name another.
    assert 200 == registry.put_route(body(attn_tp_size=4, attn_tp_rank=1, kv_layout="hnd")).status
    assert 200 == registry.put_route(body(attn_tp_size=4, attn_tp_rank=3, kv_layout="hnd")).status


def test_a_rank_alone_may_register_with_other_sizes_and_two_may_not() -> None:
    registry = RegistryNode()
    registry.put_route(body())
    assert 200 == registry.put_route(body(attn_tp_size=4)).status
    assert 200 == registry.put_route(body(attn_tp_size=4, attn_tp_rank=1)).status

    assert 400 == registry.put_route(body(attn_tp_size=2)).status


def test_a_retry_changes_nothing_and_a_new_address_does() -> None:
    registry = complete()
    before = registry.changes
    registry.put_route(body(attn_tp_rank=1, rank_port=9001))
    assert before == registry.changes

    registry.put_route(body(attn_tp_rank=1, rank_port=9555))
    assert before < registry.changes
