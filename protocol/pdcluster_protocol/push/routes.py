"""What each of our prefill ranks writes to each rank of a decode replica.

A replica says its sizes when it registers. From them and ours follow the mapping of ranks, the part
of every row that goes over, and which rank sends the metadata rows. All of it stays the same while
the two replicas live, so it is computed once for a pair of ranks.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import LayoutMismatch, RankConflict
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.ledger import NodeSetup
from pdcluster_protocol.messages import RegisterKVArgs
from pdcluster_protocol.push.registration import RANKS_MAX
from pdcluster_protocol.rank_layout import rank_slice
from pdcluster_protocol.rank_mapping import Purpose, RankMapping
from pdcluster_protocol.segments import RowSlice, row_slices
from pdcluster_protocol.topology import Parallelism, RankCoordinate

MAPPINGS_MAX = 64
"""Different sizes of decode replicas that are remembered."""


class Part(msgspec.Struct, frozen=True):
    """The part of a region's rows that goes over."""

    region: int
    """An index into the whole model's layout: the model says by it what is final."""
    rows: RowSlice


class Route(msgspec.Struct, frozen=True):
    """What one of our ranks writes to one decode rank."""

    mapping: RankMapping
    source: RankCoordinate
    destination: RankCoordinate
    parts: tuple[Part, ...]
    """Empty where other ranks hold copies of all that this one holds."""
    purpose: Purpose
    sends_metadata: bool


class Routes:
    """The routes from one node; bounded by its own ranks and `MAPPINGS_MAX` sizes of peers."""

    __slots__ = ("_mappings", "_routes", "_setup")

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._mappings: dict[tuple[int, int], RankMapping] = {}
        self._routes: dict[tuple[RankMapping, int, RankCoordinate], Route] = {}

    def of(self, args: RegisterKVArgs) -> tuple[RankMapping, RankCoordinate]:
        """How our ranks and those of a registration's replica meet, and which one it is of.

        Raises:
            LayoutMismatch: sizes that exclude each other, or a rank outside its own sizes.
        """
        if args.dcp_size != 1:
            raise LayoutMismatch(f"decode's context parallelism is {args.dcp_size}; it must be 1")
        tp, pp = args.decode_tp_size, args.decode_pp_size
        if min(tp, pp) < 1 or tp * pp > RANKS_MAX:
            raise LayoutMismatch(
                f"decode's sizes are tp {tp}, pp {pp}; each must be at least 1, and both together"
                f" at most {RANKS_MAX} ranks"
            )
        if not (0 <= args.decode_tp_rank < tp and 0 <= args.decode_pp_rank < pp):
            raise LayoutMismatch(
                f"decode's rank is tp {args.decode_tp_rank}, pp {args.decode_pp_rank}; its sizes"
                f" are {tp} and {pp}"
            )
        mapping = self._mapping(tp, pp)
        return mapping, RankCoordinate(tp=args.decode_tp_rank, pp=args.decode_pp_rank)

    def layout(self, mapping: RankMapping, destination: RankCoordinate) -> KVLayout:
        """What a decode rank holds."""
        return rank_slice(self._setup.layout, mapping.decode, destination).layout

    def route(self, mapping: RankMapping, rank: int, destination: RankCoordinate) -> Route:
        """What our rank `rank` writes to a decode rank.

        Raises:
            RankConflict: the mapping does not let these two meet.
        """
        name = (mapping, rank, destination)
        known = self._routes.get(name)
        if known is None:
            known = self._routes[name] = self._make(mapping, rank, destination)
        return known

    def deliveries(self, mapping: RankMapping) -> int:
        """How many (our rank, decode rank) pairs serve one request."""
        real = sum(mapping.purpose(place.coordinate) is Purpose.REAL for place in self._setup.ranks)
        return real * mapping.destinations_per_rank

    def _mapping(self, tp: int, pp: int) -> RankMapping:
        known = self._mappings.get((tp, pp))
        if known is None:
            known = RankMapping(self._setup.parallel, Parallelism(tp=tp, pp=pp), self._setup.facts)
            if len(self._mappings) >= MAPPINGS_MAX:
                self._mappings.clear()
                self._routes.clear()
            self._mappings[tp, pp] = known
        return known

    def _make(self, mapping: RankMapping, rank: int, destination: RankCoordinate) -> Route:
        setup = self._setup
        source = setup.ranks[rank].coordinate
        targets = mapping.targets(destination, prefill_dp=source.dp)
        if source not in targets:
            raise RankConflict(
                f"prefill rank {tuple(msgspec.to_builtins(source))} does not serve decode rank"
                f" {tuple(msgspec.to_builtins(destination))}"
            )
        places = {(r.layer, r.kind): i for i, r in enumerate(setup.layout.regions)}
        held = setup.ranks[rank].layout.regions
        slices = row_slices(mapping, setup.layout, source=source, destination=destination)
        return Route(
            mapping=mapping,
            source=source,
            destination=destination,
            parts=tuple(
                Part(places[held[s.source_region].layer, held[s.source_region].kind], s)
                for s in slices
            ),
            purpose=mapping.purpose(source),
            sends_metadata=source == targets[0],
        )
