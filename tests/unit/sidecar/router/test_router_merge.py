"""Several sequences as one answer: indices, ids, usage, ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdcluster_protocol.errors import WireError
from pdcluster_protocol.requests import Api
from pdcluster_sidecar.router.merge import MergedAnswer, MergedStream, merge_usage


def part(text: str, *, prompt: int = 4, completion: int = 2) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "details": {"x": 1}}
    choice = {"index": 0, "text": text, "unknown": [1.5]}
    return json.dumps({"id": text, "model": "m", "choices": [choice], "usage": usage}).encode()


def event(**fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields).encode()


def test_choices_are_numbered_in_the_order_of_the_sequences() -> None:
    merged = MergedAnswer(Api.COMPLETIONS, "rid", prompt_count=2, n=2)
    for index in (3, 1, 0, 2):
        merged.take(index, part(f"s{index}"))

    whole = json.loads(merged.body())

    assert [(0, "s0"), (1, "s1"), (2, "s2"), (3, "s3")] == [
        (choice["index"], choice["text"]) for choice in whole["choices"]
    ]
    assert ("rid", "m") == (whole["id"], whole["model"])
    assert [1.5] == whole["choices"][2]["unknown"]
    # Two prompts of four tokens, four samples of two.
    assert (8, 8, 16) == tuple(
        whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )


def test_an_answer_without_usage_stays_without() -> None:
    merged = MergedAnswer(Api.CHAT, "rid", prompt_count=1, n=2)
    for index in range(2):
        merged.take(index, b'{"id":"a","choices":[{"index":0}]}')

    assert "usage" not in json.loads(merged.body())


def test_a_batch_of_generate_is_a_list_of_answers_as_they_came() -> None:
    merged = MergedAnswer(Api.GENERATE, "rid", prompt_count=2, n=1)
    merged.take(0, b'{"text":"a"}')
    merged.take(1, b'{"text":"b"}')

    assert b'[{"text":"a"},{"text":"b"}]' == merged.body()


def test_events_get_the_index_of_their_sequence_and_the_id_of_the_request() -> None:
    merged = MergedStream(Api.COMPLETIONS, "rid", prompt_count=1, n=3)
    raw = event(id="x", choices=[{"index": 0, "text": "a"}]) + event(id="x", choices=[{"index": 0}])

    first, second = merged.rewrite(2, raw + b"data: [DONE]\n\n").split(b"\n\n")[:2]

    assert {"id": "rid", "choices": [{"index": 2, "text": "a"}]} == json.loads(first[6:])
    assert 2 == json.loads(second[6:])["choices"][0]["index"]
    assert b"data: [DONE]\n\n" == merged.tail()


def test_usage_comes_once_at_the_end() -> None:
    merged = MergedStream(Api.CHAT, "rid", prompt_count=1, n=2)
    for index in range(2):
        usage = {"prompt_tokens": 5, "completion_tokens": index + 1, "total_tokens": 0}
        assert b"" == merged.rewrite(index, event(id="x", choices=[], usage=usage))

    last, done = merged.tail().split(b"\n\n")[:2]

    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert {"id": "rid", "choices": [], "usage": usage} == json.loads(last[6:])
    assert b"data: [DONE]" == done


def test_generate_events_carry_an_index_and_keep_the_rest() -> None:
    merged = MergedStream(Api.GENERATE, "rid", prompt_count=2, n=1)

    raw = merged.rewrite(1, event(text="a", meta_info={"id": "r1"}))

    assert {"text": "a", "meta_info": {"id": "r1"}, "index": 1} == json.loads(raw[6:])


def test_comments_are_left_out() -> None:
    merged = MergedStream(Api.GENERATE, "rid", prompt_count=1, n=2)

    assert b"" == merged.rewrite(0, b": keep-alive\n\n")


@pytest.mark.parametrize("raw", [b"[]", b"{", b'{"choices":{}}', b'{"choices":[1]}', b"\xff"])
def test_what_is_not_of_the_apis_shape_is_the_engines_fault(raw: bytes) -> None:
    answers = MergedAnswer(Api.COMPLETIONS, "rid", prompt_count=1, n=1)
    answers.take(0, raw)
    with pytest.raises(WireError):
        answers.body()
    with pytest.raises(WireError):
        MergedStream(Api.COMPLETIONS, "rid", prompt_count=1, n=1).rewrite(0, b"data: %b\n\n" % raw)


def test_a_missing_or_odd_usage_counts_as_nothing() -> None:
    usages: list[dict[str, object]] = [{"prompt_tokens": "x"}, {}, {"completion_tokens": 2}]

    assert 2 == merge_usage(usages, n=1)["total_tokens"]
