"""Ranks: how many an instance has and how they are numbered.

As in SGLang, `tp` counts all ranks of one pipeline stage and `dp > 1` means data-parallel attention
inside it: attention TP = tp / dp / cp. One function maps ranks; registration, look-up, sender,
receiver and probes all use its result.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import ConfigError


class Parallelism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of one replica; every field is at least 1."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "pp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"parallel.{name} is {getattr(self, name)}; it must be at least 1"
                )
        if self.tp % (self.dp * self.cp) != 0:
            raise ConfigError(
                f"parallel.tp is {self.tp}; it must be a multiple of parallel.dp * parallel.cp"
                f" = {self.dp * self.cp}"
            )

    @property
    def attention_tp(self) -> int:
        """The tensor-parallel size inside one attention group."""
        return self.tp // (self.dp * self.cp)

    @property
    def ranks_per_dp(self) -> int:
        """Ranks (attention TP x CP x PP) that make one data-parallel rank."""
        return self.attention_tp * self.cp * self.pp

    @property
    def rank_count(self) -> int:
        """All ranks of the instance."""
        return self.dp * self.ranks_per_dp


class RankCoordinate(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One rank's place in its instance."""

    dp: int = 0
    cp: int = 0
    tp: int = 0
    pp: int = 0

    def unique_rank(self, parallel: Parallelism) -> int:
        """SGLang's *prefill unique rank* inside one DP rank: tp x (pp x cp) + pp x cp + cp."""
        return self.tp * (parallel.pp * parallel.cp) + self.pp * parallel.cp + self.cp

    def control_index(self, parallel: Parallelism) -> int:
        """A dense index over the instance; the rank's control port is the base plus this."""
        return self.dp * parallel.ranks_per_dp + self.unique_rank(parallel)
