"""The bodies of legs: the client's fields as they came, our own written over them.

A leg's own fields (rooms, hosts, ranks, attempts, ids) are never taken from a client: they are
dropped here and written from what the router chose.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.requests import Api, ParsedRequest

OWN: Final = frozenset(
    {
        "rid",
        "prompt",
        "messages",
        "text",
        "input_ids",
        "stream",
        "n",
        "best_of",
        "seed",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "routed_dp_rank",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
    }
)
OWN_SAMPLING: Final = frozenset({"n", "best_of", "seed", "sampling_seed"})
RESERVED_PREFIX: Final = "pd_"


class PairFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both legs of one try are told of each other."""

    bootstrap_host: str
    bootstrap_port: int
    prefill_dp_rank: int
    decode_dp_rank: int
    budget_seconds: float


class SequenceFields(msgspec.Struct, frozen=True, kw_only=True):
    """What is a sequence's own in both of its legs."""

    rid: str
    """Of its first try."""
    input_ids: msgspec.Raw
    """A JSON list, encoded once for both legs."""
    seed: int


class LegBodies:
    """One client request's fields, ready to be completed for each sequence and try."""

    __slots__ = ("_fields", "_prefill_fields", "_stream")

    def __init__(self, parsed: ParsedRequest) -> None:
        fields: dict[str, object] = {
            name: raw
            for name, raw in parsed.raw.items()
            if name not in OWN and not name.startswith(RESERVED_PREFIX)
        }
        if parsed.api is Api.GENERATE and "sampling_params" in fields:
            fields["sampling_params"] = _without_own(parsed.raw["sampling_params"])
        self._fields = fields
        self._prefill_fields = {k: v for k, v in fields.items() if k != "stream_options"}
        self._stream = parsed.stream

    def encode(
        self, role: Role, key: Key, *, rid: str, sequence: SequenceFields, pair: PairFields
    ) -> bytes:
        """The body of one leg of one try, which has the name `rid`."""
        prefill = role is Role.PREFILL
        return msgspec.json.encode(
            {
                **(self._prefill_fields if prefill else self._fields),
                "rid": rid,
                "input_ids": sequence.input_ids,
                "stream": self._stream and not prefill,
                "seed": sequence.seed,
                "bootstrap_host": pair.bootstrap_host,
                "bootstrap_port": pair.bootstrap_port,
                "bootstrap_room": key.room,
                "routed_dp_rank": pair.prefill_dp_rank if prefill else pair.decode_dp_rank,
                "disagg_prefill_dp_rank": pair.prefill_dp_rank,
                "pd_attempt": key.attempt,
                "pd_budget_seconds": pair.budget_seconds,
            }
        )


def _without_own(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    # A `null` counts as absent, as it does for every other field.
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None) or {}
    return {name: value for name, value in fields.items() if name not in OWN_SAMPLING}
