"""The body of `PUT /route`: one prefill rank says where it is and what its bytes mean."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any, Final

import msgspec

from pdcluster_protocol.errors import LayoutMismatch, PolicyMismatch, WireError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import EngineHello
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_protocol.undecodable import UNDECODABLE

RANKS_MAX: Final = 8192
FOLLOW_BOOTSTRAP_ROOM: Final = "follow_bootstrap_room"
POLICIES: Final = {"Early": "early", "PrefillComplete": "prefill_complete"}
"""Our word for the admission policy, and SGLang's."""
_HOST: Final = re.compile(r"[A-Za-z0-9_:%.\-\[\]]{1,253}")

# What every rank of one instance must say alike, and SGLang's registry takes from the first. Null
# says nothing of a field in the second list.
_SHARED: Final = (
    "attn_tp_size",
    "attn_cp_size",
    "pp_size",
    "dp_size",
    "page_size",
    "kv_cache_dtype",
    "dsv41_spec_layout",
    "follows_room",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
)
_FIRST_NON_NULL: Final = ("kv_layout",)
_shared_values: Final = attrgetter(*_SHARED)
_TEXTS: Final = ("kv_cache_dtype", "kv_layout", "load_balance_method", "decode_allocation_policy")
_texts: Final = attrgetter(*_TEXTS)


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's row, with SGLang's names. Unknown keys are ignored: its versions add some."""

    attn_tp_size: int
    attn_cp_size: int
    pp_size: int
    attn_tp_rank: int
    attn_cp_rank: int
    pp_rank: int
    attn_dp_size: int
    attn_dp_rank: int
    system_dp_size: int
    system_dp_rank: int
    rank_ip: str
    rank_port: int
    page_size: int
    kv_cache_dtype: str
    kv_layout: str | None = None
    prefill_http_port: int | None = None
    dsv41_spec_layout: dict[str, Any] | None = None
    load_balance_method: str = FOLLOW_BOOTSTRAP_ROOM
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    decode_allocation_policy: str = "early"
    pd_incarnation: str = ""
    """Ours: the instance that this rank is a member of; plain SGLang sends none."""

    @property
    def dp_size(self) -> int:
        """Data parallelism inside the server, or else over servers."""
        return self.attn_dp_size if self.system_dp_size == 1 else self.system_dp_size

    @property
    def coordinate(self) -> RankCoordinate:
        """The rank's place."""
        dp = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        return RankCoordinate(dp, self.attn_cp_rank, self.attn_tp_rank, self.pp_rank)

    @property
    def rank_count(self) -> int:
        """How many distinct ranks make the instance complete."""
        return self.dp_size * self.attn_cp_size * self.attn_tp_size * self.pp_size

    @property
    def follows_room(self) -> bool:
        """Whether the DP rank of a room is room % dp_size."""
        return self.load_balance_method == FOLLOW_BOOTSTRAP_ROOM

    @property
    def address(self) -> RankAddress:
        """The rank's ZMQ PULL socket."""
        return RankAddress(self.rank_ip, self.rank_port)

    def require_consistent(self, first: Registration) -> None:
        """Compare with a rank that is registered already.

        Raises:
            LayoutMismatch: naming the rank, the field and both values.
            PolicyMismatch: the same for the admission policy.
        """
        if _shared_values(first) != _shared_values(self):
            for name in _SHARED:
                self._require_same(name, first)
        for name in _FIRST_NON_NULL:
            if None not in (getattr(first, name), getattr(self, name)):
                self._require_same(name, first)
        known, told = first.decode_allocation_policy, self.decode_allocation_policy
        if known != told:
            raise PolicyMismatch(
                f"decode_allocation_policy of rank {self.coordinate} is {told!r}: inconsistent"
                f" policies, the registered ranks have {known!r}"
            )

    def _require_same(self, name: str, first: Registration) -> None:
        known, told = getattr(first, name), getattr(self, name)
        if known != told:
            raise LayoutMismatch(
                f"{name} of rank {self.coordinate} is {told!r}; the registered ranks have {known!r}"
            )


_decoder: Final = msgspec.json.Decoder(Registration)


def parse_registration(body: bytes) -> Registration:
    """The row in a `PUT /route` body.

    Raises:
        WireError: naming the field, its value and what it must be.
    """
    try:
        row = _decoder.decode(body)
    except UNDECODABLE as error:
        raise WireError(f"registration: {error}") from error
    _require_bounds(row)
    return row


def _require_bounds(row: Registration) -> None:
    http_port = row.prefill_http_port
    for name, value, low, high in (
        ("attn_tp_size", row.attn_tp_size, 1, RANKS_MAX),
        ("attn_cp_size", row.attn_cp_size, 1, RANKS_MAX),
        ("pp_size", row.pp_size, 1, RANKS_MAX),
        ("attn_dp_size", row.attn_dp_size, 1, RANKS_MAX),
        ("system_dp_size", row.system_dp_size, 1, RANKS_MAX),
        ("attn_tp_rank", row.attn_tp_rank, 0, row.attn_tp_size - 1),
        ("attn_cp_rank", row.attn_cp_rank, 0, row.attn_cp_size - 1),
        ("attn_dp_rank", row.attn_dp_rank, 0, row.attn_dp_size - 1),
        ("pp_rank", row.pp_rank, 0, row.pp_size - 1),
        ("system_dp_rank", row.system_dp_rank, 0, row.system_dp_size - 1),
        ("rank_port", row.rank_port, 1, 65535),
        ("page_size", row.page_size, 1, 1 << 20),
        ("prefill_http_port", 1 if http_port is None else http_port, 1, 65535),
    ):
        if not low <= value <= high:
            raise WireError(f"{name} is {value}; it must be in [{low}, {high}]")
    if row.rank_count > RANKS_MAX:
        raise WireError(f"the sizes make {row.rank_count} ranks; at most {RANKS_MAX} are taken")
    if _HOST.fullmatch(row.rank_ip) is None:
        raise WireError(f"rank_ip is {row.rank_ip[:64]!r}; it must be an address or a host name")
    for name, text in zip(_TEXTS, _texts(row), strict=True):
        if len(text or "") > 64:
            raise WireError(f"{name} is too long; at most 64 characters are taken")


def registration_of(hello: EngineHello, address: RankAddress, incarnation: str) -> Registration:
    """The row of one of our own ranks, whose control messages reach `address`."""
    parallel, coordinate = hello.parallel, hello.coordinate
    return Registration(
        attn_tp_size=parallel.attention_tp,
        attn_cp_size=parallel.cp,
        pp_size=parallel.pp,
        attn_tp_rank=coordinate.tp,
        attn_cp_rank=coordinate.cp,
        pp_rank=coordinate.pp,
        attn_dp_size=parallel.dp,
        attn_dp_rank=coordinate.dp,
        system_dp_size=1,
        system_dp_rank=0,
        rank_ip=address.host,
        rank_port=address.port,
        page_size=hello.layout.page_size,
        kv_cache_dtype=hello.layout.dtype,
        prefill_http_port=hello.http_port,
        decode_allocation_policy=POLICIES[hello.allocation],
        pd_incarnation=incarnation,
    )
