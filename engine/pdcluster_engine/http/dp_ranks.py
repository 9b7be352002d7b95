"""Which DP rank of the instance computes a sequence.

| leg | its rank |
|---|---|
| prefill | `disagg_prefill_dp_rank` if it is given, else `bootstrap_room % dp` |
| decode | `routed_dp_rank` if it is given, else `bootstrap_room % dp` |
| none (computed alone) | `routed_dp_rank` if it is given, else the rank that was asked |

Decode looks for the prefill rank by the same first row, so `routed_dp_rank` moves no prefill leg.
A decode rank that nobody chose follows the room too: rooms are random, so the ranks share the load,
and a room that is sent twice meets itself, whichever rank's port it came through.
"""

from __future__ import annotations

from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import RankConflict
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.requests import LegFields


def dp_rank_of(leg: LegFields | None, room: int | None, config: EngineConfig) -> int:
    """The rank that a sequence belongs to.

    Raises:
        RankConflict: the leg names a rank that this instance does not have.
    """
    if leg is None:
        return config.dp_rank
    dp = config.parallel.dp
    prefill = room is not None and config.role is Role.PREFILL
    name = "disagg_prefill_dp_rank" if prefill else "routed_dp_rank"
    named = leg.prefill_dp_rank if prefill else leg.routed_dp_rank
    if named is None:
        return config.dp_rank if room is None else room % dp
    if named >= dp:
        raise RankConflict(
            f"{name} is {named}; {config.instance} has {dp} DP ranks, so it must be in"
            f" [0, {dp - 1}]"
        )
    return named


def rank_addresses(config: EngineConfig) -> tuple[RankAddress, ...]:
    """The HTTP address of every DP rank: as configured, else the ports beside our own."""
    if config.rank_addresses:
        return config.rank_addresses
    base = config.http_port - config.dp_rank
    return tuple(RankAddress(config.host, base + rank) for rank in range(config.parallel.dp))
