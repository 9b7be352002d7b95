"""What each prefill rank writes to each decode rank, and what a registration may claim."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_protocol.errors import LayoutMismatch, RankConflict
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.ledger import NodeSetup
from pdcluster_protocol.messages import RegisterKVArgs
from pdcluster_protocol.push.routes import MAPPINGS_MAX, Routes
from pdcluster_protocol.rank_mapping import Purpose
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.ledgers import LAYOUT, PEER, node_setup
from support.rank_places import rank_places

HEADS = KVLayout(
    4,
    "float32",
    tuple(Region(i, kind, 8, heads=4) for i in range(2) for kind in ("key", "value")),
)


def setup(layout: KVLayout, **sizes: int) -> NodeSetup:
    parallel = Parallelism(**sizes)
    places = rank_places(layout, parallel, dp_rank=0, page_count=16, metadata_rows=(16, 8))
    return node_setup(layout=layout, parallel=parallel, ranks=places)


def claim(**changes: Any) -> RegisterKVArgs:
    return msgspec.structs.replace(RegisterKVArgs(PEER, "s", (), (), ()), **changes)


def test_heads_go_to_the_rank_that_holds_them() -> None:
    routes = Routes(setup(HEADS, tp=2))
    mapping, rank = routes.of(claim(decode_tp_size=4, decode_tp_rank=3))
    route = routes.route(mapping, 1, rank)

    assert RankCoordinate(tp=3) == rank
    assert [0, 1, 2, 3] == [part.region for part in route.parts]
    assert {(2, 0, 2)} == {
        (p.rows.source_offset, p.rows.offset, p.rows.nbytes) for p in route.parts
    }
    assert route.sends_metadata
    assert 4 == routes.deliveries(mapping)


def test_stages_send_their_own_layers_and_only_the_last_one_metadata() -> None:
    routes = Routes(setup(HEADS, pp=2))
    mapping, rank = routes.of(claim())
    first, last = (routes.route(mapping, index, rank) for index in range(2))

    assert ([0, 1], [2, 3]) == ([p.region for p in first.parts], [p.region for p in last.parts])
    assert (False, True) == (first.sends_metadata, last.sends_metadata)


def test_a_dummy_has_nothing_to_send_and_is_not_waited_for() -> None:
    routes = Routes(setup(LAYOUT, tp=2))
    mapping, rank = routes.of(claim())

    assert Purpose.DUMMY is routes.route(mapping, 1, rank).purpose
    assert () == routes.route(mapping, 1, rank).parts
    assert 1 == routes.deliveries(mapping)


def test_ranks_that_do_not_meet_are_a_conflict() -> None:
    routes = Routes(setup(HEADS, tp=2))
    mapping, rank = routes.of(claim(decode_tp_size=2, decode_tp_rank=1))

    with pytest.raises(RankConflict, match="does not serve"):
        routes.route(mapping, 0, rank)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dcp_size": 2}, "context parallelism is 2"),
        ({"decode_tp_size": 3}, "one must divide"),
        ({"decode_tp_size": 4, "decode_tp_rank": 4}, "tp 4, pp 0; its sizes are 4 and 1"),
        ({"decode_pp_size": 2, "decode_pp_rank": 0}, "parallel.pp is 1 on prefill and 2"),
        ({"decode_pp_rank": 1}, "tp 0, pp 1; its sizes are 1 and 1"),
    ],
    ids=str,
)
def test_a_claim_that_cannot_be_is_named(changes: dict[str, int], what: str) -> None:
    with pytest.raises(LayoutMismatch, match=what):
        Routes(setup(HEADS, tp=2)).of(claim(**changes))


def test_claims_of_many_sizes_do_not_make_the_table_grow() -> None:
    routes = Routes(setup(LAYOUT))
    for size in range(1, 3 * MAPPINGS_MAX):
        routes.of(claim(decode_tp_size=size))

    assert MAPPINGS_MAX >= len(routes._mappings)
