"""A prompt that cannot fit is refused before it costs what a long one costs."""

from __future__ import annotations

import json

import pytest

from pdcluster_protocol.errors import InvalidRequest, Reason
from pdcluster_protocol.requests import Api, RequestLimits, encode_bounded, parse_request

LIMITS = RequestLimits(served_name="tiny", max_context=100)


@pytest.mark.parametrize(
    ("characters", "per_token", "encoded"),
    [
        (200, 1, [200]),
        (300, 3, [200, 300]),
        (900, 9, [200, 400, 800, 900]),
        (1_000_000, 1, [200]),
        (1_000_000, 5, [200, 400, 800, 1600]),
    ],
)
def test_of_a_text_that_is_far_too_long_only_a_beginning_is_encoded(
    characters: int, per_token: int, encoded: list[int]
) -> None:
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return [0] * (len(text) // per_token)

    if characters < 1000:
        tokens = encode_bounded("x" * characters, encode, LIMITS)
        assert characters // per_token == len(tokens)
    else:
        with pytest.raises(
            InvalidRequest, match="has 1000000 characters and more than 100"
        ) as caught:
            encode_bounded("x" * characters, encode, LIMITS)
        assert Reason.TOO_LARGE == caught.value.reason
    assert encoded == lengths


def test_more_messages_than_tokens_fit_are_refused_unread() -> None:
    with pytest.raises(InvalidRequest, match="messages has 100 entries") as caught:
        parse_request(Api.CHAT, json.dumps({"messages": [{}] * 100}).encode(), LIMITS)

    assert (Reason.TOO_LARGE, "messages") == (caught.value.reason, caught.value.field)
