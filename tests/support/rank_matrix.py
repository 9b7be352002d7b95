"""Every shape of a replica up to 8 a dimension and 16 ranks, and all ranks of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pdcluster_protocol.topology import Parallelism, RankCoordinate

SIZE_MAX = 8
RANKS_MAX = 16


def shape(*, tp: int = 1, dp: int = 1, pp: int = 1, cp: int = 1) -> Parallelism:
    """A replica by its attention TP size."""
    return Parallelism(tp=tp * dp * cp, dp=dp, pp=pp, cp=cp)


def shapes() -> list[Parallelism]:
    """The whole matrix: attention TP, DP, PP and CP."""
    sizes = itertools.product(range(1, SIZE_MAX + 1), repeat=4)
    return [
        shape(tp=tp, dp=dp, pp=pp, cp=cp)
        for tp, dp, pp, cp in sizes
        if tp * dp * pp * cp <= RANKS_MAX
    ]


def ranks_of(parallel: Parallelism, *, dp: int) -> Iterator[RankCoordinate]:
    """The ranks of one DP rank: by CP, then TP, then PP from the last stage down."""
    for cp in range(parallel.cp):
        for tp in range(parallel.attention_tp):
            for pp in reversed(range(parallel.pp)):
                yield RankCoordinate(dp=dp, cp=cp, tp=tp, pp=pp)
