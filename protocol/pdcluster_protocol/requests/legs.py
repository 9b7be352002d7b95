"""The fields that make a request one leg of a pair (SGLang's names, and our `pd_` ones).

One body may carry several sequences: `bootstrap_host`, `bootstrap_port` and `bootstrap_room` are
then lists with one entry per sequence or per prompt, or single values. Sequences that share a room
number count on from it: from a single room, sequence i gets room + i; from one per prompt, as
SGLang's routers send them also with an `n`, sample s gets room + s. Both legs read the same fields,
so both derive the same rooms.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import InvalidRequest
from pdcluster_protocol.ids import ATTEMPT_MAX, ROOM_MAX
from pdcluster_protocol.requests.fields import Fields, FieldT, Interval

COMPUTED_ALONE_HOST = "2.2.2.2"
"""SGLang's health checks name this host: no transfer takes place."""

LEG_NAMES = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "pd_attempt",
    "pd_budget_seconds",
)
HOST_CHARACTERS_MAX = 253
PORTS = Interval(1, 65535)
RANKS = Interval(0, 65535)
ATTEMPTS = Interval(1, ATTEMPT_MAX)
ROOMS = Interval(1, ROOM_MAX)
BUDGETS = Interval(0, low_open=True)


class LegFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a leg says of its partner; tuples have one entry per sequence."""

    hosts: tuple[str | None, ...]
    ports: tuple[int | None, ...]
    """None: the receiving instance's own bootstrap port."""
    rooms: tuple[int | None, ...]
    routed_dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    attempt: int | None = None
    budget_seconds: float | None = None

    @property
    def paired(self) -> bool:
        """Whether a partner is named; else the sequences are computed alone."""
        return any(room is not None for room in self.rooms)


def parse_leg(fields: Fields, *, prompt_count: int, samples: int) -> LegFields | None:
    """The leg's fields, or None when the request names none of them.

    Raises:
        InvalidRequest: naming the field that is out of range, of the wrong length or missing.
    """
    if not any(fields.has(name) for name in LEG_NAMES):
        return None
    count = prompt_count * samples
    lengths = {prompt_count, count}
    hosts = _spread(
        _entries(fields, "bootstrap_host", one=str, many=list[str | None], lengths=lengths), count
    )
    if not all(host is None or 1 <= len(host) <= HOST_CHARACTERS_MAX for host in hosts):
        raise fields.refusal("bootstrap_host", f"have 1 to {HOST_CHARACTERS_MAX} characters")
    ports = _spread(
        _entries(fields, "bootstrap_port", one=int, many=list[int | None], lengths=lengths), count
    )
    if not all(port is None or PORTS.holds(port) for port in ports):
        raise fields.refusal("bootstrap_port", f"be {PORTS.words}")
    attempt = fields.integer("pd_attempt", ATTEMPTS)
    if attempt is not None and count > 1:
        raise fields.refusal("pd_attempt", "be absent when a body carries several sequences")
    rank_name = "routed_dp_rank" if fields.has("routed_dp_rank") else "data_parallel_rank"
    return LegFields(
        hosts=hosts,
        ports=ports,
        rooms=_rooms(fields, hosts, lengths=lengths),
        routed_dp_rank=fields.integer(rank_name, RANKS),
        prefill_dp_rank=fields.integer("disagg_prefill_dp_rank", RANKS),
        attempt=attempt,
        budget_seconds=fields.number("pd_budget_seconds", BUDGETS),
    )


def _rooms(
    fields: Fields, hosts: tuple[str | None, ...], *, lengths: set[int]
) -> tuple[int | None, ...]:
    """One room per sequence, each in [1, 2^63 - 1]; None where the host says computed alone."""
    name = "bootstrap_room"
    firsts = _entries(fields, name, one=int, many=list[int | None], lengths=lengths)
    sharing = len(hosts) // len(firsts)
    checked: list[int | None] = []
    for index, (host, first) in enumerate(zip(hosts, _spread(firsts, len(hosts)), strict=True)):
        room = None if first is None else first + index % sharing
        if host == COMPUTED_ALONE_HOST:
            checked.append(None)
            continue
        if room is None and host is not None:
            raise InvalidRequest(
                f"bootstrap_room is missing; bootstrap_host {host[:64]!r} needs one", field=name
            )
        if room is not None and not ROOMS.holds(room):
            raise fields.refusal(name, f"be {ROOMS.words}")
        checked.append(room)
    return tuple(checked)


def _entries(
    fields: Fields,
    name: str,
    *,
    one: type[FieldT],
    many: type[list[FieldT | None]],
    lengths: set[int],
) -> tuple[FieldT | None, ...]:
    """A single value, or the entries of a list that has one of these lengths."""
    if not fields.has(name):
        return (None,)
    must = f"be {'a string' if one is str else 'an integer'}, or a list with one per sequence"
    if fields.first_byte(name) != b"[":
        return (fields.value(name, one, must),)
    entries = fields.value(name, many, must) or []
    if len(entries) not in lengths:
        raise fields.refusal(name, f"have one entry per sequence: {max(lengths)}")
    return tuple(entries)


def _spread(entries: tuple[FieldT | None, ...], count: int) -> tuple[FieldT | None, ...]:
    """Each entry for as many sequences, one behind the other, that all `count` have one."""
    sharing = count // len(entries)
    return tuple(entry for entry in entries for _ in range(sharing))
