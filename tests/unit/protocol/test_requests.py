from __future__ import annotations

import json
from typing import Any

import pytest

from pdcluster_protocol.errors import InvalidRequest, Reason
from pdcluster_protocol.requests import (
    Api,
    ParsedRequest,
    RequestLimits,
    check_prompt_length,
    parse_request,
)

LIMITS = RequestLimits(served_name="tiny", max_context=100, vocab_size=512)
HELLO = [{"role": "user", "content": "hello"}]


def parse(api: Api, **fields: Any) -> ParsedRequest:
    return parse_request(api, json.dumps(fields).encode(), LIMITS)


def complete(**fields: Any) -> ParsedRequest:
    return parse(Api.COMPLETIONS, **{"prompt": "hello", **fields})


def chat(**fields: Any) -> ParsedRequest:
    return parse(Api.CHAT, **{"messages": HELLO, **fields})


def generate(**sampling: Any) -> ParsedRequest:
    return parse(Api.GENERATE, text="hello", sampling_params=sampling)


def refused(api: Api, body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(api, body, LIMITS)
    return caught.value


def test_a_bare_completion_has_the_defaults_of_the_api() -> None:
    parsed = complete()
    assert (("hello",), None, False) == (parsed.prompts, parsed.messages, parsed.batched)
    assert (1.0, 1.0, -1, 1) == (
        parsed.sampling.temperature,
        parsed.sampling.top_p,
        parsed.sampling.top_k,
        parsed.n,
    )
    assert (None, None, None, "tiny") == (
        parsed.max_tokens,
        parsed.seed,
        parsed.leg,
        parsed.model,
    )


@pytest.mark.parametrize(
    ("prompt", "prompts", "batched"),
    [
        ("a", ("a",), False),
        ([1, 2], ((1, 2),), False),
        (["a", "b"], ("a", "b"), True),
        ([[1], [2, 3]], ((1,), (2, 3)), True),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_them(
    prompt: Any, prompts: Any, batched: bool
) -> None:
    parsed = complete(prompt=prompt)
    assert (prompts, batched) == (parsed.prompts, parsed.batched)


@pytest.mark.parametrize("api", list(Api))
def test_every_api_takes_the_ids_of_a_router(api: Api) -> None:
    parsed = parse(api, input_ids=[5, 6])
    assert (((5, 6),), None, False) == (parsed.prompts, parsed.messages, parsed.batched)


BAD_COMPLETIONS = [
    ({"temperature": 3.5}, "temperature is 3.5; it must be in [0, 2]"),
    ({"temperature": "hot"}, 'temperature is "hot"; it must be a number in [0, 2]'),
    ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"max_tokens": -4}, "max_tokens is -4; it must be at least 1"),
    ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be an integer at least 1"),
    ({"max_tokens": True}, "max_tokens is true; it must be an integer at least 1"),
    ({"top_p": 0}, "top_p is 0; it must be in (0, 1]"),
    ({"top_k": -2}, "top_k is -2; it must be at least -1"),
    ({"min_p": 1.1}, "min_p is 1.1; it must be in [0, 1]"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be in [-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3; it must be in [-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be in (0, 2]"),
    ({"n": 0}, "n is 0; it must be in [1, 128]"),
    ({"n": 129}, "n is 129; it must be in [1, 128]"),
    ({"logprobs": 21}, "logprobs is 21; it must be in [0, 20]"),
    ({"logprobs": True}, "logprobs is true; it must be an integer in [0, 20]"),
    ({"stream": 1}, "stream is 1; it must be true or false"),
    ({"seed": "x"}, 'seed is "x"; it must be an integer in'),
    ({"seed": 1 << 64}, "seed is 18446744073709551616; it must be in"),
    ({"stop": 5}, "stop is 5; it must be a string, or a list of at most 16 strings"),
    ({"stop": ""}, 'stop is ""; it must be a string'),
    ({"stop": ["a"] * 17}, "it must be a string, or a list of at most 16 strings"),
    ({"stop": "x" * 1025}, "it must hold at most 1024 characters each"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is [-1]; it must be a list of at most 256"),
    ({"ignore_eos": "yes"}, 'ignore_eos is "yes"; it must be true or false'),
    ({"stream_options": 3}, "stream_options is 3; it must be an object"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage is 1; it must be"),
    ({"prompt": ""}, "prompt is empty; give at least one token"),
    ({"prompt": []}, "prompt is empty; give at least one token"),
    ({"prompt": ["a", ""]}, "prompt[1] is empty; give at least one token"),
    ({"prompt": None}, "prompt is missing; it must hold the prompt"),
    ({"prompt": 7}, "prompt is 7; it must be a string, a list of token ids"),
    ({"prompt": [1, "a"]}, "it must be a string, a list of token ids, or a list of these"),
    ({"prompt": [512]}, "prompt holds the token id 512; ids must be in [0, 511]"),
    ({"prompt": [[1], [-1]]}, "prompt[1] holds the token id -1; ids must be in [0, 511]"),
    ({"prompt": ["a"] * 257}, "prompt has 257 prompts; send at most 256"),
    ({"prompt": ["a"] * 3, "n": 100}, "together 300 sequences; ask for at most 256"),
    ({"input_ids": [1]}, "prompt and input_ids are both given; send one"),
    ({"rid": ""}, 'rid is ""; it must be a string of 1 to 256 characters'),
    ({"rid": ["a", "b"]}, "it must have 1 different entries, one per prompt"),
]


@pytest.mark.parametrize(("fields", "detail"), BAD_COMPLETIONS)
def test_a_wrong_value_is_refused_with_field_value_and_fix(
    fields: dict[str, Any], detail: str
) -> None:
    error = refused(Api.COMPLETIONS, json.dumps({"prompt": "hello", **fields}).encode())
    assert Reason.INVALID_REQUEST == error.reason
    assert detail in error.detail
    assert error.field is not None


def test_a_wrong_value_in_sampling_params_is_named_with_its_path() -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_params\.top_p is 2; it must be in"):
        generate(top_p=2)
    with pytest.raises(InvalidRequest, match=r"^sampling_params\.max_new_tokens is 0; it must"):
        generate(max_new_tokens=0)


@pytest.mark.parametrize(
    ("messages", "detail"),
    [
        (None, "messages is missing"),
        ([], "messages is []; it must hold at least one message"),
        ("hi", 'messages is "hi"; it must be a list of objects'),
        ([{"content": "x"}], "messages[0].role is missing"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "boss", "content": "x"}], 'messages[0].role is "boss"; it must be one of'),
        ([{"role": "user", "content": 5}], "messages[0].content is 5; it must be a string"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text is missing"),
    ],
)
def test_wrong_messages_are_refused_with_their_place(messages: Any, detail: str) -> None:
    error = refused(Api.CHAT, json.dumps({"messages": messages}).encode())
    assert detail in error.detail


def test_text_parts_are_joined_and_developer_speaks_as_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = chat(messages=[{"role": "developer", "content": parts, "name": "n"}])
    assert ({"role": "system", "content": "a\nb", "name": "n"},) == parsed.messages


@pytest.mark.parametrize(
    ("api", "fields", "name"),
    [
        (Api.CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (Api.CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (Api.CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (Api.CHAT, {"audio": {"voice": "x"}}, "audio"),
        (Api.CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (
            Api.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            Api.CHAT,
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role",
        ),
        (Api.COMPLETIONS, {"logit_bias": {"5": 1}}, "logit_bias"),
        (Api.COMPLETIONS, {"best_of": 2}, "best_of"),
        (Api.COMPLETIONS, {"suffix": "x"}, "suffix"),
        (Api.COMPLETIONS, {"echo": True}, "echo"),
        (Api.GENERATE, {"sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        (Api.GENERATE, {"logprob_start_len": 0}, "logprob_start_len"),
    ],
)
def test_what_would_change_the_answer_and_is_not_built_is_refused_by_name(
    api: Api, fields: dict[str, Any], name: str
) -> None:
    base: dict[Api, dict[str, Any]] = {
        Api.CHAT: {"messages": HELLO},
        Api.COMPLETIONS: {"prompt": "x"},
        Api.GENERATE: {"text": "x"},
    }
    error = refused(api, json.dumps({**base[api], **fields}).encode())
    assert (Reason.UNSUPPORTED, name) == (error.reason, error.field)
    assert error.detail.startswith(f"{name} is ")


def test_what_changes_nothing_is_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias={},
        modalities=["text"],
        nobody_knows=[{"this": 1}],
    )
    complete(best_of=1, echo=False, suffix="", logprobs=None, stop=None)


def test_the_model_must_be_the_served_one() -> None:
    error = refused(Api.COMPLETIONS, b'{"model": "other", "prompt": "x"}')
    assert (Reason.MODEL_NOT_FOUND, 404) == (error.reason, error.http_status)
    assert 'model is "other"; it must be tiny' == error.detail
    assert "tiny" == complete(model="tiny").model


@pytest.mark.parametrize("api", list(Api))
def test_unknown_is_what_routers_of_others_call_no_model(api: Api) -> None:
    own = {Api.COMPLETIONS: "prompt", Api.CHAT: "messages", Api.GENERATE: "text"}[api]
    value = [{"role": "user", "content": "x"}] if api is Api.CHAT else "x"
    body = json.dumps({"model": "unknown", own: value}).encode()
    assert "tiny" == parse_request(api, body, LIMITS).model


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"prompt"',
        b"{'prompt': 1}",
        b'{"prompt": "x"} tail',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"unknown": "\xff", "prompt": "x"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert 400 == refused(Api.COMPLETIONS, body).http_status


def test_a_doubled_key_has_one_meaning_and_stays_single() -> None:
    body = b'{"prompt": "x", "bootstrap_room": 5, "n": 9, "n": 2, "bootstrap_room": null}'
    parsed = parse_request(Api.COMPLETIONS, body, LIMITS)
    assert (2, None) == (parsed.n, parsed.leg)
    assert ["prompt", "bootstrap_room", "n"] == list(parsed.raw)
    assert b"2" == bytes(parsed.raw["n"])


def test_chat_logprobs_need_the_switch() -> None:
    assert 3 == chat(logprobs=True, top_logprobs=3).sampling.logprobs
    assert 0 == chat(logprobs=True).sampling.logprobs
    assert None is chat(logprobs=False).sampling.logprobs
    with pytest.raises(InvalidRequest, match="top_logprobs is 3; it must be absent or 0, unless"):
        chat(top_logprobs=3)


def test_generate_reads_sampling_params() -> None:
    parsed = parse(
        Api.GENERATE,
        text=["a", "b"],
        sampling_params={
            "max_new_tokens": 7,
            "temperature": 0,
            "sampling_seed": 11,
            "stop": ["x", "y"],
            "stop_token_ids": [3],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "n": 2,
        },
        return_logprob=True,
        top_logprobs_num=4,
        rid=["r", "s"],
        stream=True,
    )
    assert (("a", "b"), True, 2, 4) == (
        parsed.prompts,
        parsed.batched,
        parsed.n,
        parsed.sequence_count,
    )
    assert (7, 11, True, ("r", "s")) == (
        parsed.max_tokens,
        parsed.seed,
        parsed.stream,
        parsed.rids,
    )
    sampling = parsed.sampling
    assert (0.0, ("x", "y"), (3,), True, False, 4) == (
        sampling.temperature,
        sampling.stop,
        sampling.stop_token_ids,
        sampling.ignore_eos,
        sampling.skip_special_tokens,
        sampling.logprobs,
    )


def test_a_routers_seed_comes_before_the_clients() -> None:
    parsed = parse(Api.GENERATE, text="x", sampling_params={"seed": 1}, seed=2)
    assert 2 == parsed.seed


def test_max_completion_tokens_is_the_newer_word() -> None:
    assert 5 == chat(max_tokens=9, max_completion_tokens=5).max_tokens
    assert 9 == chat(max_tokens=9).max_tokens


@pytest.mark.parametrize(
    ("request_", "token_count", "expected"),
    [
        (complete(), 10, 16),
        (complete(), 90, 10),
        (chat(), 10, 90),
        (generate(), 10, 90),
        (complete(max_tokens=90), 10, 90),
        (complete(), 99, 1),
    ],
)
def test_output_tokens_fit_behind_the_prompt(
    request_: ParsedRequest, token_count: int, expected: int
) -> None:
    assert expected == check_prompt_length(token_count, request_, LIMITS)


@pytest.mark.parametrize(
    ("request_", "token_count", "field", "detail"),
    [
        (complete(), 100, "prompt", "the prompt has 100 tokens; with max_context 100 it must"),
        (complete(), 5000, "prompt", "it must have at most 99"),
        (complete(max_tokens=91), 10, "max_tokens", "max_tokens is 91; behind a prompt of 10"),
    ],
)
def test_what_does_not_fit_is_too_large(
    request_: ParsedRequest, token_count: int, field: str, detail: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_length(token_count, request_, LIMITS)
    assert (Reason.TOO_LARGE, 400, field) == (
        caught.value.reason,
        caught.value.http_status,
        caught.value.field,
    )
    assert detail in caught.value.detail


def test_a_long_value_is_cut_in_the_error() -> None:
    error = refused(Api.COMPLETIONS, b'{"prompt": "x", "temperature": "' + b"y" * 10_000 + b'"}')
    assert len(error.detail) < 200
