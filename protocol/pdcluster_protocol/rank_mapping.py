"""Which prefill ranks a decode rank deals with, and the other way round.

The rules are SGLang's, so that either side may be an engine we did not write. Let p and d be the
attention TP sizes of prefill and decode. TP ranks meet by division: a decode rank has a span of p/d
prefill ranks, or shares one with its d/p - 1 neighbours. Of prefill's CP ranks all send or only the
first; its PP ranks meet decode's one to one, or all of them meet the only one. So each prefill rank
has one `Purpose`, whoever asks:

    REAL    writes and reports; decode waits for it
    DUMMY   is given addresses and an empty page list, so that its sender can conclude, but neither
            writes nor reports: latent KV is whole in every TP rank, one of a span is enough
    IDLE    is never contacted and concludes by itself: a CP rank behind the first, unless all send

A data-parallel rank is chosen per request, never by this mapping: targets have the DP rank that the
caller names.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdcluster_protocol.errors import ConfigError, LayoutMismatch, RankConflict
from pdcluster_protocol.ids import Role
from pdcluster_protocol.topology import Parallelism, RankCoordinate


class KVKind(StrEnum):
    """How KV is divided over TP ranks."""

    PER_HEAD = "PerHead"
    LATENT = "Latent"
    """MLA: every TP rank holds whole rows."""
    HYBRID_LATENT = "HybridLatent"
    """MLA beside layers with state per head: mapped like heads, and all CP ranks send."""


class RowSpread(StrEnum):
    """Which CP ranks of prefill send a prompt's rows."""

    FIRST_CP_RANK = "FirstCpRank"
    """Every CP rank has all rows; rank 0 sends them."""
    PAGE_RANGES = "PageRanges"
    """All CP ranks send, each its range of the request's pages."""
    LAYERS = "Layers"
    """All CP ranks send, each the layers it holds."""
    SHARDED_PAGES = "ShardedPages"
    """Page l lies on rank l mod n as page l div n; n counts CP ranks, or TP ranks of latent KV."""


class Purpose(StrEnum):
    """What a prefill rank does for decode."""

    REAL = "Real"
    DUMMY = "Dummy"
    IDLE = "Idle"


class KVFacts(msgspec.Struct, frozen=True):
    """What the mapping must know of the model and of prefill's flags."""

    kind: KVKind
    layers: int
    heads: int = 1
    """KV heads of the whole model; means nothing for latent KV."""
    spread: RowSpread = RowSpread.FIRST_CP_RANK


class RankMapping(msgspec.Struct, frozen=True):
    """The mapping between two replicas; one that breaks a rule cannot be made.

    Raises:
        LayoutMismatch: naming the sizes that exclude each other.
    """

    prefill: Parallelism
    decode: Parallelism
    facts: KVFacts

    def __post_init__(self) -> None:
        fault = (
            side_fault(self.prefill, self.facts, role=Role.PREFILL)
            or side_fault(self.decode, self.facts, role=Role.DECODE)
            or self._pair_fault()
        )
        if fault:
            raise LayoutMismatch(fault)

    @property
    def spread(self) -> RowSpread:
        """The spread that holds: hybrids always send from all CP ranks."""
        spread = self.facts.spread
        if self.facts.kind is KVKind.HYBRID_LATENT and spread is RowSpread.FIRST_CP_RANK:
            return RowSpread.PAGE_RANGES
        return spread

    @property
    def shards_over_tp(self) -> bool:
        """Whether pages are sharded over TP ranks, so that every decode rank needs all of them."""
        return (
            self.spread is RowSpread.SHARDED_PAGES
            and self.facts.kind is KVKind.LATENT
            and self.prefill.cp == 1
        )

    @property
    def destinations_per_rank(self) -> int:
        """Decode ranks of one DP rank whose metadata a contacted prefill rank waits for."""
        if self.shards_over_tp:
            return self.decode.attention_tp
        return max(1, self.decode.attention_tp // self.prefill.attention_tp)

    @property
    def responses(self) -> int:
        """Final words that a decode rank waits for: one of each real target."""
        span = self._span
        senders = 1 if self._one_of_a_span_sends else span
        return senders * len(self._cp_ranks) * (self.prefill.pp if self.decode.pp == 1 else 1)

    def purpose(self, rank: RankCoordinate) -> Purpose:
        """What a prefill rank does; the same for every decode rank that it serves.

        Raises:
            RankConflict: prefill has no such rank.
        """
        _require_inside(rank, self.prefill, role=Role.PREFILL)
        if rank.cp not in self._cp_ranks:
            return Purpose.IDLE
        if self._one_of_a_span_sends and rank.tp % self._span != 0:
            return Purpose.DUMMY
        return Purpose.REAL

    def targets(self, rank: RankCoordinate, *, prefill_dp: int) -> tuple[RankCoordinate, ...]:
        """The prefill ranks, dummies included, that a decode rank registers with, in order.

        The order is CP, then TP, then PP from the last stage down, so the first one is real and of
        the stage that samples. A cancel goes to all of them.

        Raises:
            RankConflict: decode has no such rank, or prefill no such DP rank.
        """
        _require_inside(rank, self.decode, role=Role.DECODE)
        _require_inside(RankCoordinate(dp=prefill_dp), self.prefill, role=Role.PREFILL)
        first = self._first_tp(rank.tp)
        stages = range(self.prefill.pp - 1, -1, -1) if self.decode.pp == 1 else (rank.pp,)
        return tuple(
            RankCoordinate(dp=prefill_dp, cp=cp, tp=tp, pp=pp)
            for cp in self._cp_ranks
            for tp in range(first, first + self._span)
            for pp in stages
        )

    def served(self, rank: RankCoordinate, *, decode_dp: int) -> tuple[RankCoordinate, ...]:
        """The decode ranks of one DP rank that have this prefill rank among their targets.

        Raises:
            RankConflict: prefill has no such rank, or decode no such DP rank.
        """
        _require_inside(rank, self.prefill, role=Role.PREFILL)
        _require_inside(RankCoordinate(dp=decode_dp), self.decode, role=Role.DECODE)
        everyone = (
            RankCoordinate(dp=decode_dp, tp=tp, pp=pp)
            for tp in range(self.decode.attention_tp)
            for pp in range(self.decode.pp)
        )
        return tuple(one for one in everyone if rank in self.targets(one, prefill_dp=rank.dp))

    @property
    def _span(self) -> int:
        """Prefill TP ranks that one decode rank deals with."""
        if self.shards_over_tp:
            return self.prefill.attention_tp
        return max(1, self.prefill.attention_tp // self.decode.attention_tp)

    @property
    def _one_of_a_span_sends(self) -> bool:
        return self.facts.kind is KVKind.LATENT and not self.shards_over_tp

    @property
    def _cp_ranks(self) -> range:
        return range(1 if self.spread is RowSpread.FIRST_CP_RANK else self.prefill.cp)

    def _first_tp(self, decode_tp: int) -> int:
        if self.shards_over_tp:
            return 0
        return decode_tp * self.prefill.attention_tp // self.decode.attention_tp

    def _pair_fault(self) -> str:
        p, d = self.prefill.attention_tp, self.decode.attention_tp
        if p % d != 0 and d % p != 0:
            return f"attention TP is {p} on prefill and {d} on decode; one must divide the other"
        if self.shards_over_tp and p != d:
            return (
                f"attention TP is {p} on prefill and {d} on decode; with latent KV sharded over"
                " TP ranks they must be equal"
            )
        if self.decode.pp not in (1, self.prefill.pp):
            return (
                f"parallel.pp is {self.prefill.pp} on prefill and {self.decode.pp} on decode;"
                " decode's must be 1 or equal"
            )
        return ""


def side_fault(parallel: Parallelism, facts: KVFacts, *, role: Role) -> str:
    """Why one replica alone can be no side of a mapping; empty when it can."""
    tp, heads = parallel.attention_tp, facts.heads
    divisible = heads > 0 and (tp % heads == 0 or heads % tp == 0)
    if role is Role.DECODE and parallel.cp != 1:
        return f"decode's parallel.cp is {parallel.cp}; only prefill splits a context, set it to 1"
    if parallel.pp > facts.layers:
        return f"{role}'s parallel.pp is {parallel.pp}; the model has {facts.layers} layers"
    if facts.kind is KVKind.PER_HEAD and not divisible:
        return (
            f"{role}'s attention TP is {tp} and the model has {heads} KV heads; one must divide"
            " the other"
        )
    if facts.kind is KVKind.HYBRID_LATENT and facts.spread is RowSpread.SHARDED_PAGES:
        return "pages of hybrid latent KV cannot be sharded over ranks"
    return ""


def require_side(parallel: Parallelism, facts: KVFacts, *, role: Role) -> None:
    """Refuse, at start, a replica that no peer could be paired with.

    Raises:
        ConfigError: naming the size and what it may be.
    """
    fault = side_fault(parallel, facts, role=role)
    if fault:
        raise ConfigError(fault)


def _require_inside(rank: RankCoordinate, parallel: Parallelism, *, role: Role) -> None:
    sizes = (
        ("dp", rank.dp, parallel.dp),
        ("cp", rank.cp, parallel.cp),
        ("tp", rank.tp, parallel.attention_tp),
        ("pp", rank.pp, parallel.pp),
    )
    for name, value, size in sizes:
        if not 0 <= value < size:
            raise RankConflict(f"{role} rank: {name} is {value}; it must be in [0, {size - 1}]")
