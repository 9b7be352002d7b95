"""How ranks are counted and numbered."""

from __future__ import annotations

import itertools

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.topology import Parallelism, RankCoordinate

SHAPES = [
    Parallelism(tp=tp * dp * cp, dp=dp, pp=pp, cp=cp)
    for tp, dp, pp, cp in itertools.product((1, 2, 3), repeat=4)
]


def coordinates(parallel: Parallelism) -> list[RankCoordinate]:
    return [
        RankCoordinate(dp=dp, cp=cp, tp=tp, pp=pp)
        for dp in range(parallel.dp)
        for cp in range(parallel.cp)
        for tp in range(parallel.attention_tp)
        for pp in range(parallel.pp)
    ]


@pytest.mark.parametrize("parallel", SHAPES, ids=str)
def test_control_indices_are_dense_and_unique(parallel: Parallelism) -> None:
    indices = [c.control_index(parallel) for c in coordinates(parallel)]

    assert list(range(parallel.rank_count)) == sorted(indices)


@pytest.mark.parametrize("parallel", SHAPES, ids=str)
def test_unique_ranks_are_dense_inside_each_dp_rank(parallel: Parallelism) -> None:
    for dp in range(parallel.dp):
        ranks = [c.unique_rank(parallel) for c in coordinates(parallel) if c.dp == dp]
        assert list(range(parallel.ranks_per_dp)) == sorted(ranks)


def test_the_unique_rank_is_the_one_that_sglang_computes() -> None:
    parallel = Parallelism(tp=4, pp=2, cp=2)

    assert 2 == parallel.attention_tp
    # tp x (pp x cp) + pp x cp + cp
    assert 1 * 4 + 1 * 2 + 1 == RankCoordinate(cp=1, tp=1, pp=1).unique_rank(parallel)
    assert 1 * 4 + 0 * 2 + 1 == RankCoordinate(cp=1, tp=1, pp=0).unique_rank(parallel)


def test_tp_counts_the_ranks_of_data_parallel_attention_too() -> None:
    parallel = Parallelism(tp=8, dp=4, pp=3)

    assert (2, 6, 24) == (parallel.attention_tp, parallel.ranks_per_dp, parallel.rank_count)


@pytest.mark.parametrize("name", ["tp", "dp", "pp", "cp", "ep"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused_by_name(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"parallel\.{name} is {size}; it must be at least 1"):
        Parallelism(**{name: size})


def test_tp_that_dp_and_cp_do_not_divide_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp is 6; .* multiple of .* = 4"):
        Parallelism(tp=6, dp=2, cp=2)
