"""Targets of a decode rank, purposes of prefill ranks, and what is refused, over the whole matrix.

The oracle knows no division: ranks are intervals of [0, 1), and two TP ranks meet where theirs
overlap.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache

import pytest

from pdcluster_protocol.errors import ConfigError, LayoutMismatch, RankConflict
from pdcluster_protocol.ids import Role
from pdcluster_protocol.rank_mapping import (
    KVFacts,
    KVKind,
    Purpose,
    RankMapping,
    RowSpread,
    require_side,
)
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.rank_matrix import ranks_of, shape, shapes

LAYERS = 9
LATENT = KVFacts(KVKind.LATENT, LAYERS)
HEADS = KVFacts(KVKind.PER_HEAD, LAYERS, heads=8)
SHARDED = KVFacts(KVKind.LATENT, LAYERS, spread=RowSpread.SHARDED_PAGES)
ALL_CP = KVFacts(KVKind.PER_HEAD, LAYERS, heads=8, spread=RowSpread.PAGE_RANGES)

MATRIX_FACTS = [
    *(KVFacts(KVKind.LATENT, LAYERS, spread=spread) for spread in RowSpread),
    *(KVFacts(KVKind.PER_HEAD, LAYERS, heads, RowSpread.FIRST_CP_RANK) for heads in (1, 6, 8)),
    *(KVFacts(KVKind.PER_HEAD, LAYERS, 4, spread) for spread in RowSpread),
    KVFacts(KVKind.HYBRID_LATENT, LAYERS),
]


@cache
def meet(mine: int, my_size: int, theirs: int, their_size: int) -> bool:
    """Whether two TP ranks' parts of the heads overlap."""
    return Fraction(mine, my_size) < Fraction(theirs + 1, their_size) and Fraction(
        theirs, their_size
    ) < Fraction(mine + 1, my_size)


@cache
def nest(one: int, other: int) -> bool:
    """Whether one division of [0, 1) has all the cuts of the other."""
    cuts = {Fraction(i, one) for i in range(one)}
    others = {Fraction(i, other) for i in range(other)}
    return cuts <= others or others <= cuts


def sharded_over_tp(prefill: Parallelism, facts: KVFacts) -> bool:
    return facts.kind is KVKind.LATENT and facts.spread == "ShardedPages" and prefill.cp == 1


def allowed(prefill: Parallelism, decode: Parallelism, facts: KVFacts) -> bool:
    p, d = prefill.attention_tp, decode.attention_tp
    divides = facts.kind is not KVKind.PER_HEAD or (nest(p, facts.heads) and nest(d, facts.heads))
    stages = (prefill.pp, decode.pp)
    return (
        decode.cp == 1
        and divides
        and nest(p, d)
        and (stages[0] == stages[1] or stages[1] == 1)
        and not (sharded_over_tp(prefill, facts) and p != d)
    )


def oracle(
    prefill: Parallelism, decode: Parallelism, facts: KVFacts, rank: RankCoordinate, dp: int
) -> list[tuple[RankCoordinate, bool]]:
    """(target, whether it is real) in order, by asking each prefill rank alone."""
    together = sharded_over_tp(prefill, facts)
    all_cp = facts.spread is not RowSpread.FIRST_CP_RANK or facts.kind is KVKind.HYBRID_LATENT
    found: list[tuple[RankCoordinate, bool]] = []
    taken: set[tuple[int, int]] = set()
    for candidate in ranks_of(prefill, dp=dp):
        overlaps = meet(candidate.tp, prefill.attention_tp, rank.tp, decode.attention_tp)
        if not (together or overlaps) or not (all_cp or candidate.cp == 0):
            continue
        if decode.pp != 1 and candidate.pp != rank.pp:
            continue
        copy = facts.kind is KVKind.LATENT and (candidate.cp, candidate.pp) in taken
        taken.add((candidate.cp, candidate.pp))
        found.append((candidate, together or not copy))
    return found


def check(mapping: RankMapping, *, prefill_dp: int, decode_dp: int) -> None:
    """Both directions of a mapping between two DP ranks."""
    prefill, decode, facts = mapping.prefill, mapping.decode, mapping.facts
    served: dict[RankCoordinate, set[RankCoordinate]] = {}
    purposes: dict[RankCoordinate, set[bool]] = {}
    for rank in ranks_of(decode, dp=decode_dp):
        expected = oracle(prefill, decode, facts, rank, prefill_dp)
        assert tuple(target for target, _ in expected) == mapping.targets(
            rank, prefill_dp=prefill_dp
        )
        assert expected[0][1], "the first target is real and of the last stage it may be of"
        assert sum(real for _, real in expected) == mapping.responses
        for target, real in expected:
            served.setdefault(target, set()).add(rank)
            purposes.setdefault(target, set()).add(real)
    for rank in ranks_of(prefill, dp=prefill_dp):
        back = mapping.served(rank, decode_dp=decode_dp)
        assert served.get(rank, set()) == set(back)
        assert len(set(back)) == len(back)
        assert len(back) == (mapping.destinations_per_rank if back else 0)
        expected_purpose = {
            frozenset[bool](): Purpose.IDLE,
            frozenset({True}): Purpose.REAL,
            frozenset({False}): Purpose.DUMMY,
        }[frozenset(purposes.get(rank, set()))]
        assert expected_purpose is mapping.purpose(rank)


def facts_for(prefill: Parallelism, decode: Parallelism, number: int) -> list[KVFacts]:
    """All facts where DP is largest; elsewhere, since DP only relabels, they take turns."""
    if all(side.dp == min(8, 16 // side.ranks_per_dp) for side in (prefill, decode)):
        return MATRIX_FACTS
    return [MATRIX_FACTS[number % len(MATRIX_FACTS)]]


def refusal(prefill: Parallelism, decode: Parallelism, facts: KVFacts) -> RankMapping | str:
    try:
        return RankMapping(prefill, decode, facts)
    except LayoutMismatch as mismatch:
        return mismatch.detail


def test_110940_cases_of_29584_pairs_are_mapped_or_refused_as_the_oracle_says() -> None:
    matrix = shapes()
    pairs = [(prefill, decode) for prefill in matrix for decode in matrix]
    mapped = refused = 0
    for number, (prefill, decode) in enumerate(pairs):
        for facts in facts_for(prefill, decode, number):
            mapping = refusal(prefill, decode, facts)
            assert allowed(prefill, decode, facts) is isinstance(mapping, RankMapping), mapping
            if isinstance(mapping, RankMapping):
                mapped += 1
                check(mapping, prefill_dp=prefill.dp - 1, decode_dp=decode.dp // 2)
            else:
                refused += 1
    assert (29584, 10344, 100596) == (len(pairs), mapped, refused)


@pytest.mark.parametrize(
    ("prefill", "decode", "facts", "destinations", "responses", "targets"),
    [
        pytest.param(shape(tp=4), shape(tp=4), HEADS, 1, 1, ["r1"], id="equal TP"),
        pytest.param(shape(tp=1), shape(tp=2), HEADS, 2, 1, ["r0"], id="TP 1 to 2"),
        pytest.param(shape(tp=2), shape(tp=8), LATENT, 4, 1, ["r0"], id="TP 2 to 8, latent"),
        pytest.param(shape(tp=4), shape(tp=2), HEADS, 1, 2, ["r2", "r3"], id="TP 4 to 2"),
        pytest.param(shape(tp=4), shape(tp=2), LATENT, 1, 1, ["r2", "d3"], id="TP 4 to 2, latent"),
        pytest.param(
            shape(tp=2), shape(tp=2), SHARDED, 2, 2, ["r0", "r1"], id="latent sharded over TP"
        ),
        pytest.param(shape(tp=2, pp=2), shape(tp=2), HEADS, 1, 2, ["r1p1", "r1p0"], id="PP 2 to 1"),
        pytest.param(
            shape(tp=4, pp=2),
            shape(tp=2),
            LATENT,
            1,
            2,
            ["r2p1", "r2p0", "d3p1", "d3p0"],
            id="TP 4 to 2 and PP 2 to 1, latent",
        ),
        pytest.param(shape(tp=2, cp=2), shape(tp=2), HEADS, 1, 1, ["r1"], id="CP 2 to 1, first"),
        pytest.param(
            shape(tp=2, cp=2), shape(tp=2), ALL_CP, 1, 2, ["r1", "r1c1"], id="CP 2 to 1, all"
        ),
        pytest.param(
            shape(tp=2, cp=2), shape(tp=2), SHARDED, 1, 2, ["r1", "r1c1"], id="sharded over CP"
        ),
        pytest.param(
            shape(tp=4, cp=2),
            shape(tp=2),
            KVFacts(KVKind.HYBRID_LATENT, LAYERS),
            1,
            4,
            ["r2", "r3", "r2c1", "r3c1"],
            id="hybrids send from all ranks",
        ),
    ],
)
def test_the_rows_of_the_table_of_mappings(
    prefill: Parallelism,
    decode: Parallelism,
    facts: KVFacts,
    destinations: int,
    responses: int,
    targets: list[str],
) -> None:
    """Of decode's TP rank 1: `r` real or `d` dummy, TP, CP and PP place."""
    mapping = RankMapping(prefill, decode, facts)

    def name(rank: RankCoordinate) -> str:
        places = f"c{rank.cp}" * (rank.cp > 0), f"p{rank.pp}" * (prefill.pp > 1)
        return f"{mapping.purpose(rank)[0].lower()}{rank.tp}{''.join(places)}"

    assert targets == [name(rank) for rank in mapping.targets(RankCoordinate(tp=1), prefill_dp=0)]
    assert destinations == mapping.destinations_per_rank
    assert responses == mapping.responses


def test_equal_stages_meet_one_to_one() -> None:
    mapping = RankMapping(shape(pp=4), shape(pp=4), HEADS)

    assert (RankCoordinate(pp=2),) == mapping.targets(RankCoordinate(pp=2), prefill_dp=0)
    assert (RankCoordinate(pp=2),) == mapping.served(RankCoordinate(pp=2), decode_dp=0)


def test_targets_have_the_dp_rank_that_was_asked_for() -> None:
    mapping = RankMapping(shape(dp=3), shape(dp=2), HEADS)

    assert (RankCoordinate(dp=2),) == mapping.targets(RankCoordinate(dp=1), prefill_dp=2)
    assert (RankCoordinate(dp=1),) == mapping.served(RankCoordinate(dp=2), decode_dp=1)


@pytest.mark.parametrize(
    ("prefill", "decode", "facts", "what"),
    [
        (shape(), shape(cp=2), HEADS, "decode's parallel.cp is 2; only prefill splits a context"),
        (shape(tp=3), shape(tp=2), LATENT, "attention TP is 3 on prefill and 2 on decode; one"),
        (shape(pp=4), shape(pp=2), HEADS, "parallel.pp is 4 on prefill and 2 on decode; decode's"),
        (shape(), shape(pp=2), HEADS, "parallel.pp is 1 on prefill and 2 on decode; decode's must"),
        (shape(tp=3), shape(), HEADS, "prefill's attention TP is 3 and the model has 8 KV heads"),
        (shape(), shape(tp=5), HEADS, "decode's attention TP is 5 and the model has 8 KV heads"),
        (shape(), shape(), KVFacts(KVKind.PER_HEAD, 9, 0), "the model has 0 KV heads"),
        (shape(pp=8), shape(), KVFacts(KVKind.LATENT, 4), "prefill's parallel.pp is 8; the model"),
        (shape(tp=4), shape(tp=2), SHARDED, "with latent KV sharded over TP ranks they must be"),
        (
            shape(cp=2),
            shape(),
            KVFacts(KVKind.HYBRID_LATENT, LAYERS, spread=RowSpread.SHARDED_PAGES),
            "pages of hybrid latent KV cannot be sharded",
        ),
    ],
)
def test_what_the_rules_exclude_is_refused_by_name(
    prefill: Parallelism, decode: Parallelism, facts: KVFacts, what: str
) -> None:
    with pytest.raises(LayoutMismatch, match=re.escape(what)):
        RankMapping(prefill, decode, facts)


def test_a_side_that_fits_no_peer_is_refused_at_start() -> None:
    require_side(shape(cp=2), HEADS, role=Role.PREFILL)
    with pytest.raises(ConfigError, match=r"decode's parallel\.cp is 2; .* set it to 1"):
        require_side(shape(cp=2), HEADS, role=Role.DECODE)


def test_a_rank_that_does_not_exist_is_refused_by_name() -> None:
    mapping = RankMapping(shape(tp=2, dp=2), shape(tp=2), HEADS)

    with pytest.raises(RankConflict, match=r"decode rank: tp is 2; it must be in \[0, 1\]"):
        mapping.targets(RankCoordinate(tp=2), prefill_dp=0)
    with pytest.raises(RankConflict, match=r"prefill rank: dp is 2"):
        mapping.targets(RankCoordinate(), prefill_dp=2)
    with pytest.raises(RankConflict, match=r"prefill rank: cp is 1"):
        mapping.purpose(RankCoordinate(cp=1))
    with pytest.raises(RankConflict, match=r"prefill rank: pp is -1"):
        mapping.served(RankCoordinate(pp=-1), decode_dp=0)
