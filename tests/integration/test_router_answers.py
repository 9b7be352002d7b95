"""A router over canned workers: what both legs get, and what the client gets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from pdcluster_protocol.ids import ROOM_MAX, Role
from pdcluster_sidecar.router.tokens import Codec
from support.canned import CannedWorker, World, answer, byte_tokenizer, world

HELLO_IDS = byte_tokenizer().encode("hello").ids


async def post(here: World, path: str, body: object) -> aiohttp.ClientResponse:
    async with aiohttp.ClientSession() as session:
        response = await session.post(here.url + path, json=body)
        await response.read()
        return response


def events_in(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended properly."""
    payloads = [each.removeprefix("data: ") for each in text.split("\n\n") if each]
    assert "[DONE]" == payloads.pop()
    return [json.loads(payload) for payload in payloads]


async def test_both_legs_get_the_same_ids_room_attempt_and_seed(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        response = await post(here, "/v1/completions", {"prompt": "hello", "top_k": 3})

        assert 200 == response.status
        (prefill,), (decode,) = here.legs(Role.PREFILL), here.legs(Role.DECODE)
        shared = ("input_ids", "rid", "seed", "bootstrap_room", "pd_attempt", "top_k")
        assert {name: prefill.body[name] for name in shared} == {
            name: decode.body[name] for name in shared
        }
        assert HELLO_IDS == decode.body["input_ids"]
        assert response.headers["x-request-id"] == decode.body["rid"]
        assert 1 <= decode.body["bootstrap_room"] <= ROOM_MAX
        assert here.prefill.host == decode.body["bootstrap_host"]
        assert here.prefill.sidecar_port == decode.body["bootstrap_port"]
        assert 0 < decode.body["pd_budget_seconds"]
        assert "prompt" not in decode.body
        assert [] == here.prefill.unauthorized + here.decode.unauthorized


async def test_a_plain_answer_is_decodes_answer_byte_for_byte(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        response = await post(here, "/v1/completions", {"prompt": "hello", "seed": 7})

        answered = json.loads(await response.read())
        assert "5/7" == answered["choices"][0]["text"]
        assert {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7} == answered["usage"]
        assert str(len(await response.read())) == response.headers["content-length"]


async def test_a_stream_is_decodes_events_and_only_decode_streams(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        body = {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}
        response = await post(here, "/v1/completions", body)

        events = events_in(await response.text())
        assert ["t0", "t1", "t2"] == [e["choices"][0]["text"] for e in events if e["choices"]]
        assert 7 == events[-1]["usage"]["total_tokens"]
        assert "text/event-stream" == response.headers["content-type"]
        (prefill,), (decode,) = here.legs(Role.PREFILL), here.legs(Role.DECODE)
        assert (False, True) == (prefill.body["stream"], decode.body["stream"])
        assert "stream_options" not in prefill.body


async def test_a_chat_is_rendered_by_the_engines_own_template(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        messages = [{"role": "user", "content": "hi"}]
        response = await post(here, "/v1/chat/completions", {"messages": messages})

        assert "assistant" == json.loads(await response.read())["choices"][0]["message"]["role"]
        (decode,) = here.legs(Role.DECODE)
        assert byte_tokenizer().encode("user:hi\nassistant:").ids == decode.body["input_ids"]
        assert "messages" not in decode.body


async def test_a_long_prompt_is_tokenised_beside_the_loop(tmp_path: Path) -> None:
    async with world(tmp_path, max_context=20000) as here:
        response = await post(here, "/v1/completions", {"prompt": "x" * 9000})

        assert 200 == response.status
        assert 9000 == len(here.legs(Role.DECODE)[0].body["input_ids"])


@pytest.mark.parametrize("prompt", ["hello", "x" * 9000])
async def test_a_fault_of_our_own_ends_its_request_in_words_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    async with world(tmp_path, max_context=20000) as here:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: told.append(context["exception"])
        )
        fault = ZeroDivisionError("planted")
        with monkeypatch.context() as planted:
            planted.setattr(Codec, "encode_request", Mock(side_effect=fault))
            response = await post(here, "/v1/completions", {"prompt": prompt})
            assert 500 == response.status
            assert "InvariantViolated" == (await response.json())["error"]["code"]
        assert [fault] == told
        assert 200 == (await post(here, "/v1/completions", {"prompt": prompt})).status


async def test_what_only_a_router_may_say_is_never_taken_from_a_client(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        theirs = {
            "prompt": [1, 2, 3],
            "rid": "mine",
            "bootstrap_host": "10.0.0.1",
            "bootstrap_port": 1,
            "bootstrap_room": 5,
            "routed_dp_rank": 0,
            "disagg_prefill_dp_rank": 0,
            "pd_attempt": 9,
            "pd_budget_seconds": 1e9,
            "pd_anything": 1,
        }
        response = await post(here, "/v1/completions", theirs)

        (decode,) = here.legs(Role.DECODE)
        assert "mine" != decode.body["rid"]
        assert 5 != decode.body["bootstrap_room"]
        assert 9 != decode.body["pd_attempt"]
        assert here.prefill.host == decode.body["bootstrap_host"]
        assert "pd_anything" not in decode.body
        assert "mine" == response.headers["x-client-request-id"]


@pytest.mark.parametrize(
    "theirs",
    [
        {"bootstrap_host": "10.0.0.1"},
        {"bootstrap_room": "many"},
        {"routed_dp_rank": -1},
        {"pd_attempt": None, "pd_budget_seconds": "long"},
    ],
)
async def test_even_malformed_they_are_dropped_and_not_asked_for(
    tmp_path: Path, theirs: dict[str, object]
) -> None:
    async with world(tmp_path) as here:
        response = await post(here, "/v1/completions", {"prompt": [1, 2, 3], **theirs})

        assert 200 == response.status
        (decode,) = here.legs(Role.DECODE)
        assert here.prefill.host == decode.body["bootstrap_host"]


async def test_doubled_keys_have_one_meaning(tmp_path: Path) -> None:
    async with world(tmp_path) as here, aiohttp.ClientSession() as session:
        raw = b'{"prompt":"a","rid":"x","rid":"y","prompt":"hello","bootstrap_room":1}'
        async with session.post(here.url + "/v1/completions", data=raw) as response:
            assert 200 == response.status
        assert HELLO_IDS == here.legs(Role.DECODE)[0].body["input_ids"]
        assert here.legs(Role.DECODE)[0].body["rid"].startswith("pd-")


async def test_each_sample_has_a_room_and_a_seed_of_its_own(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        response = await post(here, "/v1/completions", {"prompt": "hello", "n": 3, "seed": 10})

        answered = json.loads(await response.read())
        assert [(0, "5/10"), (1, "5/11"), (2, "5/12")] == [
            (choice["index"], choice["text"]) for choice in answered["choices"]
        ]
        # One prompt was given once; three samples were made.
        usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
        assert usage == answered["usage"]
        assert response.headers["x-request-id"] == answered["id"]
        legs = here.legs(Role.DECODE)
        assert 3 == len({leg.body["bootstrap_room"] for leg in legs})
        assert 3 == len({leg.body["pd_attempt"] for leg in legs})
        assert 3 == len({leg.body["rid"] for leg in legs})
        assert 3 == len(here.legs(Role.PREFILL))


async def test_a_list_of_prompts_is_answered_in_its_order(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        body = {"prompt": [[1, 2], "abc", [4]], "n": 1, "seed": 1}
        refused = await post(here, "/v1/completions", body)
        body = {"prompt": ["ab", "abc", "d"], "n": 2, "seed": 1}
        response = await post(here, "/v1/completions", body)

        assert 400 == refused.status
        answered = json.loads(await response.read())
        assert ["2/1", "2/2", "3/1", "3/2", "1/1", "1/2"] == [
            choice["text"] for choice in answered["choices"]
        ]
        assert {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18} == answered[
            "usage"
        ]


async def test_merged_streams_have_one_end_and_one_usage(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        body = {
            "prompt": ["ab", "abc"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = await post(here, "/v1/completions", body)

        events = events_in(await response.text())
        by_index: dict[int, list[str]] = {}
        for event in events[:-1]:
            (choice,) = event["choices"]
            by_index.setdefault(choice["index"], []).append(choice["text"])
        assert {0: ["t0", "t1", "t2"], 1: ["t0", "t1", "t2"]} == by_index
        assert {response.headers["x-request-id"]} == {event["id"] for event in events}
        assert {"prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14} == events[-1][
            "usage"
        ]


async def test_generate_has_sglangs_shapes(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        single = await post(here, "/generate", {"text": "hello", "sampling_params": {"seed": 3}})
        batch = await post(here, "/generate", {"text": ["hello", "hi"]})
        stream = await post(here, "/generate", {"text": ["hello", "hi"], "stream": True})

        assert "5/3" == json.loads(await single.read())["text"]
        assert "seed" not in here.legs(Role.DECODE)[0].body["sampling_params"]
        assert [5, 2] == [len(leg.body["input_ids"]) for leg in here.legs(Role.DECODE)[1:3]]
        assert 2 == len(json.loads(await batch.read()))
        events = events_in(await stream.text())
        assert {0: 3, 1: 3} == {
            index: sum(event["index"] == index for event in events) for index in (0, 1)
        }


async def test_the_room_names_prefills_rank_and_each_leg_goes_to_its_ranks_port(
    tmp_path: Path,
) -> None:
    workers = [CannedWorker(Role.PREFILL, dp=2), CannedWorker(Role.DECODE, dp=3)]
    async with world(tmp_path, workers=workers) as here:
        requests = [post(here, "/v1/completions", {"prompt": "hello"}) for _ in range(24)]
        responses = await asyncio.gather(*requests)

        assert {200} == {response.status for response in responses}
        for leg in here.legs(Role.PREFILL):
            assert leg.dp == leg.body["bootstrap_room"] % 2 == leg.body["routed_dp_rank"]
            assert leg.dp == leg.body["disagg_prefill_dp_rank"]
        for leg in here.legs(Role.DECODE):
            assert leg.dp == leg.body["routed_dp_rank"]
        assert {0, 1} == {leg.dp for leg in here.legs(Role.PREFILL)}
        assert {0, 1, 2} == {leg.dp for leg in here.legs(Role.DECODE)}


async def test_leg_connections_are_used_again(tmp_path: Path) -> None:
    peers = set()

    async def note_peer(leg: Any, request: Any) -> Any:
        peers.add(request.transport.get_extra_info("peername"))
        return await answer(leg, request)

    async with world(tmp_path) as here:
        here.decode.behaviour = note_peer
        for _ in range(5):
            assert 200 == (await post(here, "/v1/completions", {"prompt": "hello"})).status

        assert 1 == len(peers)


async def test_models_health_and_readiness_are_read(tmp_path: Path) -> None:
    async with world(tmp_path) as here, aiohttp.ClientSession() as session:
        async with session.get(here.url + "/v1/models") as response:
            listed = await response.json()
        async with session.get(here.url + "/v1/models/tiny") as response:
            assert listed["data"][0] == await response.json()
        async with session.get(here.url + "/v1/models/huge") as response:
            assert 404 == response.status
        async with session.get(here.url + "/health") as response:
            assert "OK" == await response.text()
        async with session.get(here.url + "/ready") as response:
            assert 200 == response.status


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "said"),
    [
        ("/v1/completions", {"prompt": "x" * 600}, 400, "TooLarge", "600 tokens"),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 600},
            400,
            "TooLarge",
            "max_tokens is 600",
        ),
        ("/v1/completions", {"prompt": "x", "model": "gpt"}, 404, "ModelNotFound", "gpt"),
        ("/v1/completions", {"prompt": ""}, 400, "InvalidRequest", "prompt"),
        ("/v1/completions", {"prompt": [999]}, 400, "InvalidRequest", "999"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "InvalidRequest", "max_tokens"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "InvalidRequest", "hot"),
        ("/v1/chat/completions", {"messages": []}, 400, "InvalidRequest", "messages"),
        ("/v1/chat/completions", {"prompt": "x"}, 400, "InvalidRequest", "messages"),
        ("/generate", {"input_ids": []}, 400, "InvalidRequest", "input_ids"),
        ("/v1/completions", [], 400, "InvalidRequest", "JSON object"),
    ],
)
async def test_bad_input_is_refused_by_name_before_any_leg(
    tmp_path: Path, path: str, body: object, status: int, code: str, said: str
) -> None:
    async with world(tmp_path) as here:
        response = await post(here, path, body)

        error = json.loads(await response.read())["error"]
        assert (status, code) == (response.status, error["code"])
        assert code == response.headers["x-pd-reason"]
        assert said in error["message"]
        assert [] == here.legs(Role.PREFILL) + here.legs(Role.DECODE)
