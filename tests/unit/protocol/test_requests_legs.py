from __future__ import annotations

import json
from typing import Any

import pytest

from pdcluster_protocol.errors import InvalidRequest
from pdcluster_protocol.requests import Api, LegFields, RequestLimits, parse_request

LIMITS = RequestLimits(served_name="tiny", max_context=100, vocab_size=512)
ROOM_MAX = (1 << 63) - 1


def leg_of(**fields: Any) -> LegFields | None:
    body = json.dumps({"prompt": "hello", **fields}).encode()
    return parse_request(Api.COMPLETIONS, body, LIMITS).leg


def test_a_leg_names_its_partner() -> None:
    leg = leg_of(
        bootstrap_host="127.64.0.1",
        bootstrap_port=8998,
        bootstrap_room=ROOM_MAX,
        routed_dp_rank=1,
        disagg_prefill_dp_rank=0,
        pd_attempt=(1 << 64) - 1,
        pd_budget_seconds=12.5,
    )
    assert leg is not None
    assert (("127.64.0.1",), (8998,), (ROOM_MAX,)) == (leg.hosts, leg.ports, leg.rooms)
    assert (1, 0, (1 << 64) - 1, 12.5, True) == (
        leg.routed_dp_rank,
        leg.prefill_dp_rank,
        leg.attempt,
        leg.budget_seconds,
        leg.paired,
    )


def test_every_sequence_gets_its_own_room() -> None:
    counted = leg_of(prompt=["a", "b"], n=2, bootstrap_host="h", bootstrap_room=7)
    listed = leg_of(
        prompt=["a", "b"],
        bootstrap_host=["h", "i"],
        bootstrap_port=[1, None],
        bootstrap_room=[7, 3],
    )
    assert counted is not None
    assert listed is not None
    assert (7, 8, 9, 10) == counted.rooms
    assert (("h", "i"), (1, None), (7, 3)) == (listed.hosts, listed.ports, listed.rooms)


def test_rooms_that_come_one_per_prompt_are_counted_on_for_its_samples() -> None:
    leg = leg_of(
        prompt=["a", "b"],
        n=3,
        bootstrap_host=["h", "i"],
        bootstrap_port=[1, None],
        bootstrap_room=[70, 30],
    )
    assert leg is not None
    assert (70, 71, 72, 30, 31, 32) == leg.rooms
    assert (("h",) * 3 + ("i",) * 3, (1,) * 3 + (None,) * 3) == (leg.hosts, leg.ports)


def test_the_host_of_health_checks_is_computed_alone() -> None:
    leg = leg_of(bootstrap_host="2.2.2.2", bootstrap_room=0)
    assert leg is not None
    assert ((None,), False) == (leg.rooms, leg.paired)


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"bootstrap_room": 0}, "bootstrap_room is 0; it must be in [1, 9223372036854775807]"),
        ({"bootstrap_room": -1}, "bootstrap_room is -1; it must be in"),
        ({"bootstrap_room": 1 << 63}, "bootstrap_room is 9223372036854775808; it must be in"),
        ({"bootstrap_room": "7"}, 'bootstrap_room is "7"; it must be an integer, or a list'),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room is [1, 2]; it must have one entry per"),
        ({"bootstrap_room": ROOM_MAX, "n": 2}, "it must be in [1, 9223372036854775807]"),
        ({"bootstrap_host": "h"}, "bootstrap_room is missing; bootstrap_host 'h' needs one"),
        ({"bootstrap_host": "", "bootstrap_room": 5}, 'bootstrap_host is ""; it must have 1 to'),
        ({"bootstrap_host": 5}, "bootstrap_host is 5; it must be a string, or a list"),
        ({"bootstrap_port": 0}, "bootstrap_port is 0; it must be in [1, 65535]"),
        ({"bootstrap_port": 70000}, "bootstrap_port is 70000; it must be in [1, 65535]"),
        ({"routed_dp_rank": -1}, "routed_dp_rank is -1; it must be in"),
        ({"pd_attempt": 0}, "pd_attempt is 0; it must be in"),
        ({"pd_attempt": 5, "n": 2}, "pd_attempt is 5; it must be absent when a body carries"),
        ({"pd_budget_seconds": 0}, "pd_budget_seconds is 0; it must be above 0"),
    ],
)
def test_a_wrong_leg_is_refused_by_name(fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        leg_of(**fields)
    assert detail in caught.value.detail
