"""The bootstrap registry of one instance: SGLang's HTTP contract, without its accidents.

Same paths, keys and codes. What is better stays inside the contract:

- ranks are distinct members of one incarnation: the same coordinates registered again replace their
  address and are not counted twice, so eight registrations of rank 0 make nothing ready;
- everything that shapes bytes is compared between ranks, and refused with both values (400);
- a table of one incarnation takes no row of another; a new incarnation of our own starts it anew;
- malformed input is 400, never 500, and every table has a bound.

Each method that answers HTTP takes the raw input and gives an `Answer`; none raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pdcluster_protocol.errors import NotReady, PDClusterError, RankConflict, WireError
from pdcluster_protocol.ids import ROOM_MAX
from pdcluster_protocol.push.registration import Registration, parse_registration
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_protocol.undecodable import UNDECODABLE

ROOM_SECONDS: Final = 240.0
"""SGLang's entries live for 120 to 240 s, by its clean-up's luck; ours for the longer."""
ROOMS_MAX: Final = 65536
_COORDINATES: Final = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
_SENTINEL: Final = (-1, -1, -1, -1)


class Answer(msgspec.Struct, frozen=True):
    """What the HTTP shell sends."""

    status: int
    text: str
    json: bool = False
    """The text is JSON, and the content type says so."""


class _DpRankBody(msgspec.Struct, frozen=True):
    bootstrap_room: int
    dp_rank: int


class _RoomsBody(msgspec.Struct, frozen=True):
    bootstrap_rooms: list[int]


class RegistryNode:
    """The ranks of one instance by coordinate, and which DP rank serves a room."""

    __slots__ = ("_incarnation", "_rooms", "_rooms_max", "_rows", "_speakers", "changes")

    def __init__(self, *, rooms_max: int = ROOMS_MAX) -> None:
        self._rows: dict[RankCoordinate, Registration] = {}
        self._speakers: dict[RankCoordinate, Registration] = {}
        """The rows that name what others may leave unsaid."""
        self.changes = 0
        """Moves whenever `get_route` may answer otherwise than before."""
        self._incarnation = ""
        self._rooms: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._rooms_max = rooms_max

    # --- membership -----------------------------------------------------------------------------

    def begin(self, incarnation: str) -> None:
        """A new incarnation of our own instance: whatever was registered before is gone."""
        self._rows.clear()
        self._speakers.clear()
        self._rooms.clear()
        self._incarnation = incarnation
        self.changes += 1

    def register(self, row: Registration) -> None:
        """Add a rank, or replace the address of one that registered before.

        Raises:
            RankConflict: the table belongs to another incarnation.
            LayoutMismatch: it disagrees with the registered ranks about bytes.
            PolicyMismatch: it disagrees about admission.
        """
        place = row.coordinate
        if (self._rows or self._incarnation) and row.pd_incarnation != self._incarnation:
            raise RankConflict(
                f"rank {place} is of incarnation {row.pd_incarnation!r}; this table is of"
                f" {self._incarnation!r}"
            )
        if self._rows.get(place) == row:
            # A retry: whoever sent it did not see our answer.
            return
        # All rows agree already, so any other one speaks for all of them.
        for rows in (self._rows, self._speakers):
            other = _row_of_another(rows, place)
            if other is not None:
                row.require_consistent(other)
        self._incarnation = row.pd_incarnation
        self._rows[place] = row
        self._speakers.pop(place, None)
        if row.kv_layout is not None:
            self._speakers[place] = row
        self.changes += 1

    def forget(self) -> None:
        """The instance died."""
        self.begin("")

    @property
    def registered(self) -> int:
        """Distinct ranks."""
        return len(self._rows)

    @property
    def expected(self) -> int:
        """Ranks of a complete instance; 0 while none is registered."""
        return next((row.rank_count for row in self._rows.values()), 0)

    @property
    def ready(self) -> bool:
        """Every rank is registered."""
        return 0 < self.expected == self.registered

    # --- HTTP -----------------------------------------------------------------------------------

    def put_route(self, body: bytes) -> Answer:
        """`PUT /route`: 200, or 400 naming what is wrong."""
        try:
            self.register(parse_registration(body))
        except PDClusterError as error:
            return Answer(400, error.detail)
        return Answer(200, "OK")

    def get_route(self, query: Mapping[str, str]) -> Answer:
        """`GET /route`: server information (all -1) or one rank's address; 400, 404 or 503."""
        try:
            place = _place(query)
            self._require_ready()
        except WireError as error:
            return Answer(400, error.detail)
        except NotReady as error:
            return Answer(503, error.detail)
        if place == _SENTINEL:
            return _json(self._server_information())
        dp, cp, tp, pp = place
        row = self._rows.get(RankCoordinate(dp, cp, tp, pp))
        if row is None:
            return Answer(404, f"no rank has dp {dp}, cp {cp}, tp {tp}, pp {pp}")
        return _json({"rank_ip": row.rank_ip, "rank_port": row.rank_port})

    def register_dp_rank(self, body: bytes, now: float) -> Answer:
        """`POST /register_dp_rank`: remember which DP rank serves a room."""
        try:
            entry = msgspec.json.decode(body, type=_DpRankBody)
        except UNDECODABLE as error:
            return Answer(400, f"register_dp_rank: {error}")
        size = next((row.dp_size for row in self._rows.values()), 1 << 16)
        if not 1 <= entry.bootstrap_room <= ROOM_MAX:
            return Answer(400, f"bootstrap_room is {entry.bootstrap_room}; use [1, {ROOM_MAX}]")
        if not 0 <= entry.dp_rank < size:
            return Answer(400, f"dp_rank is {entry.dp_rank}; it must be in [0, {size - 1}]")
        self._expire(now)
        self._rooms.pop(entry.bootstrap_room, None)
        self._rooms[entry.bootstrap_room] = (entry.dp_rank, now + ROOM_SECONDS)
        if len(self._rooms) > self._rooms_max:
            self._rooms.popitem(last=False)
        return Answer(200, "OK")

    def query_dp_ranks(self, body: bytes, now: float) -> Answer:
        """`POST /query_dp_ranks`: the DP ranks of these rooms; unknown ones are absent."""
        try:
            entry = msgspec.json.decode(body, type=_RoomsBody)
        except UNDECODABLE as error:
            return Answer(400, f"query_dp_ranks: {error}")
        self._expire(now)
        found = {}
        for room in entry.bootstrap_rooms:
            known = self._rooms.get(room)
            if known is not None:
                found[str(room)] = known[0]
        return _json(found)

    def deadline(self) -> float | None:
        """When the oldest room entry expires."""
        return next((expiry for _, expiry in self._rooms.values()), None)

    # --- details --------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        # Entries are in the order of their writing, so of their expiry.
        while self._rooms and next(iter(self._rooms.values()))[1] <= now:
            self._rooms.popitem(last=False)

    def _require_ready(self) -> None:
        if not self.ready:
            raise NotReady(
                f"prefill is not ready: {self.registered} of {self.expected or 'unknown many'}"
                " workers are registered"
            )

    def _server_information(self) -> dict[str, Any]:
        """Exactly keys that SGLang's decoder knows: an unknown one would break it."""
        rows = list(self._rows.values())
        first = rows[0]
        information = {
            "attn_tp_size": first.attn_tp_size,
            "attn_cp_size": first.attn_cp_size,
            "dp_size": first.dp_size,
            "pp_size": first.pp_size,
            "page_size": first.page_size,
            "kv_cache_dtype": first.kv_cache_dtype,
            "follow_bootstrap_room": first.follows_room,
            "enable_dsa_cache_layer_split": first.enable_dsa_cache_layer_split,
            "enable_kv_cache_sharding": first.enable_kv_cache_sharding,
            "decode_allocation_policy": first.decode_allocation_policy,
            "prefill_http_port": _first_said([row.prefill_http_port for row in rows]),
            # Decoders of older versions refuse these keys even when they are null.
            "kv_layout": _first_said([row.kv_layout for row in rows]),
            "dsv41_spec_layout": first.dsv41_spec_layout,
        }
        for name in ("kv_layout", "dsv41_spec_layout"):
            if information[name] is None:
                del information[name]
        return information


def _place(query: Mapping[str, str]) -> tuple[int, ...]:
    """The four coordinates of a query.

    Raises:
        WireError: one is missing, empty or no number.
    """
    place = []
    for name in _COORDINATES:
        text = query.get(name, "")
        if not text:
            raise WireError(f"query parameter {name} is missing; all of {_COORDINATES} are needed")
        if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > 9:
            raise WireError(f"query parameter {name} is {text[:32]!r}; it must be an integer")
        place.append(int(text))
    return tuple(place)


def _row_of_another(
    rows: dict[RankCoordinate, Registration], place: RankCoordinate
) -> Registration | None:
    """A row that binds the rank at `place`: it replaces its own, so only the others do."""
    return next((row for other, row in rows.items() if other != place), None)


def _first_said(values: list[Any]) -> Any:  # noqa: ANN401 - values of several JSON types
    return next((value for value in values if value is not None), None)


def _json(content: dict[str, Any]) -> Answer:
    return Answer(200, msgspec.json.encode(content).decode(), json=True)
