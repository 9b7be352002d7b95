"""Whatever a client sends is understood or refused, and means the same after a rewrite."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdcluster_protocol.errors import InvalidRequest
from pdcluster_protocol.requests import (
    Api,
    RequestLimits,
    check_prompt_length,
    parse_request,
)

LIMITS = RequestLimits(served_name="tiny", max_context=4096)
NAMES = [
    "prompt",
    "messages",
    "text",
    "input_ids",
    "sampling_params",
    "model",
    "n",
    "stop",
    "seed",
    "rid",
    "stream",
    "stream_options",
    "temperature",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "stop_token_ids",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "pd_attempt",
    "tools",
    "role",
    "content",
    "type",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "tiny", "text", "2.2.2.2"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=5,
)


@given(api=st.sampled_from(Api), body=st.binary(max_size=64))
def test_any_bytes_are_understood_or_refused(api: Api, body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_request(api, body, LIMITS)


# Slow only while the machine is busy.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    api=st.sampled_from(Api),
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5),
    token_count=st.integers(0, 5000),
)
def test_any_object_is_understood_or_refused_and_its_rewrite_means_the_same(
    api: Api, fields: dict[str, Any], token_count: int
) -> None:
    try:
        parsed = parse_request(api, json.dumps(fields).encode(), LIMITS)
    except InvalidRequest:
        return
    again = parse_request(api, msgspec.json.encode(parsed.raw), LIMITS)
    empty: dict[str, msgspec.Raw] = {}
    assert msgspec.structs.replace(parsed, raw=empty) == msgspec.structs.replace(again, raw=empty)
    assert (parsed.messages is None) == bool(parsed.prompts)
    with contextlib.suppress(InvalidRequest):
        output_tokens_max = check_prompt_length(token_count, parsed, LIMITS)
        assert 1 <= output_tokens_max
        assert token_count + output_tokens_max <= LIMITS.max_context


@given(
    room=st.integers(1, (1 << 63) - 400),
    prompts=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8),
    n=st.integers(1, 16),
)
def test_rooms_of_one_body_are_distinct_and_valid(room: int, prompts: list[str], n: int) -> None:
    body = {"prompt": prompts, "n": n, "bootstrap_host": "h", "bootstrap_room": room}
    parsed = parse_request(Api.COMPLETIONS, json.dumps(body).encode(), LIMITS)
    assert parsed.leg is not None
    rooms = parsed.leg.rooms
    assert parsed.sequence_count == len(set(rooms)) == len(rooms)
    assert all(room is not None and 1 <= room < 1 << 63 for room in rooms)
