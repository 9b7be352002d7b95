"""The body of `PUT /route`: one prefill rank says where it is and what its bytes mean."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from pdcluster_protocol.errors import LayoutMismatch, PolicyMismatch, WireError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import EngineHello
from pdcluster_protocol.topology import RankCoordinate

RANKS_MAX: Final = 8192
FOLLOW_BOOTSTRAP_ROOM: Final = "follow_bootstrap_room"
POLICIES: Final = {"Early": "early", "PrefillComplete": "prefill_complete"}
"""Our word for the admission policy, and SGLang's."""
_HOST: Final = re.compile(r"[A-Za-z0-9_:%.\-\[\]]{1,253}")

# What every rank of one instance must say alike, and SGLang's registry takes from the first.
_SHARED: Final = (
    "attn_tp_size",
    "attn_cp_size",
    "pp_size",
    "dp_size",
    "page_size",
    "kv_cache_dtype",
    "kv_layout",
    "dsv41_spec_layout",
    "follows_room",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
)
_FIRST_NON_NULL: Final = ("kv_layout",)


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
        rank = self.coordinate
        for name in _SHARED:
            known, told = getattr(first, name), getattr(self, name)
            unsaid = name in _FIRST_NON_NULL and (known is None or told is None)
            if known != told and not unsaid:
                raise LayoutMismatch(
                    f"{name} of rank {rank} is {told!r}; the registered ranks have {known!r}"
                )
        known, told = first.decode_allocation_policy, self.decode_allocation_policy
        if known != told:
            raise PolicyMismatch(
                f"decode_allocation_policy of rank {rank} is {told!r}: inconsistent policies, the"
                f" registered ranks have {known!r}"
            )


_decoder: Final = msgspec.json.Decoder(Registration)


def parse_registration(body: bytes) -> Registration:
    """The row in a `PUT /route` body.

    Raises:
        WireError: naming the field, its value and what it must be.
    """
    try:
        row = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"registration: {error}") from error
    _require_bounds(row)
    return row


def _require_bounds(row: Registration) -> None:
    for name in ("attn_tp_size", "attn_cp_size", "pp_size", "attn_dp_size", "system_dp_size"):
        _require(row, name, 1, RANKS_MAX)
    for name in ("tp", "cp", "dp"):
        _require(row, f"attn_{name}_rank", 0, getattr(row, f"attn_{name}_size") - 1)
    _require(row, "pp_rank", 0, row.pp_size - 1)
    _require(row, "system_dp_rank", 0, row.system_dp_size - 1)
    _require(row, "rank_port", 1, 65535)
    _require(row, "page_size", 1, 1 << 20)
    if row.prefill_http_port is not None:
        _require(row, "prefill_http_port", 1, 65535)
    if row.rank_count > RANKS_MAX:
        raise WireError(f"the sizes make {row.rank_count} ranks; at most {RANKS_MAX} are taken")
    if _HOST.fullmatch(row.rank_ip) is None:
        raise WireError(f"rank_ip is {row.rank_ip[:64]!r}; it must be an address or a host name")
    for name in ("kv_cache_dtype", "kv_layout", "load_balance_method", "decode_allocation_policy"):
        if len(getattr(row, name) or "") > 64:
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


def _require(row: Registration, name: str, low: int, high: int) -> None:
    value = getattr(row, name)
    if not low <= value <= high:
        raise WireError(f"{name} is {value}; it must be in [{low}, {high}]")
