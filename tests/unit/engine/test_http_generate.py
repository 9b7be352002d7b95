"""SGLang's `/generate` over a real server."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from support.scripted_engine import CODEC, ScriptedEngine, logprob, serving, spell

TEXT = "one two"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda submission: spell(TEXT, submission, ends=True))


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(engine) as address, aiohttp.ClientSession(address) as client:
        yield client


async def generate(client: aiohttp.ClientSession, **fields: Any) -> Any:
    async with client.post("/generate", json=fields) as answer:
        assert 200 == answer.status, await answer.text()
        return await answer.json()


async def test_generate_answers_with_text_ids_and_meta(client: aiohttp.ClientSession) -> None:
    answer = await generate(
        client,
        text="hello",
        rid="mine",
        sampling_params={"max_new_tokens": 3, "temperature": 0},
        return_logprob=True,
        top_logprobs_num=2,
    )
    ids = CODEC.encode("one")
    assert ("one", ids) == (answer["text"], answer["output_ids"])
    meta = answer["meta_info"]
    assert ("mine", {"type": "length", "length": 3}) == (meta["id"], meta["finish_reason"])
    assert (5, 3, 0) == (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"])
    expected = [[logprob(index), token, None] for index, token in enumerate(ids)]
    assert expected == meta["output_token_logprobs"]
    assert [[logprob(0), 0, None], [logprob(1), 1, None]] == meta["output_top_logprobs"][0]
    assert [] == meta["input_token_logprobs"]


async def test_generate_takes_ids_and_names_the_stop(client: aiohttp.ClientSession) -> None:
    answer = await generate(client, input_ids=[1, 2, 3], sampling_params={"stop": " t"})
    assert "one" == answer["text"]
    assert {"type": "stop", "matched": " t"} == answer["meta_info"]["finish_reason"]
    assert 3 == answer["meta_info"]["prompt_tokens"]
    assert "index" not in answer


async def test_a_put_is_a_post(client: aiohttp.ClientSession) -> None:
    async with client.put("/generate", json={"text": "x"}) as answer:
        assert 200 == answer.status
        assert TEXT == (await answer.json())["text"]


async def test_a_batch_is_answered_with_a_list(
    engine: ScriptedEngine, client: aiohttp.ClientSession
) -> None:
    answers = await generate(
        client, text=["a", "bc"], rid=["r", "s"], sampling_params={"n": 2, "max_new_tokens": 1}
    )
    assert [1, 1, 2, 2] == [answer["meta_info"]["prompt_tokens"] for answer in answers]
    assert ["r_0", "r_1", "s_0", "s_1"] == [answer["meta_info"]["id"] for answer in answers]
    assert [0, 1, 2, 3] == [answer["index"] for answer in answers]
    single = await generate(client, text=["a"], sampling_params={"max_new_tokens": 1})
    assert 1 == len(single)


async def test_every_event_of_a_stream_repeats_all_so_far(client: aiohttp.ClientSession) -> None:
    async with client.post("/generate", json={"text": "x", "stream": True}) as answer:
        body = await answer.text()
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert "[DONE]" == events.pop()
    parsed = [json.loads(event) for event in events]
    for before, after in itertools.pairwise(parsed):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert (TEXT, CODEC.encode(TEXT)) == (parsed[-1]["text"], parsed[-1]["output_ids"])
    assert "stop" == parsed[-1]["meta_info"]["finish_reason"]["type"]


async def test_a_batched_stream_says_which_sequence(client: aiohttp.ClientSession) -> None:
    async with client.post("/generate", json={"text": ["x", "y"], "stream": True}) as answer:
        body = await answer.text()
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line][:-1]
    last = {json.loads(event)["index"]: json.loads(event)["text"] for event in events}
    assert {0: TEXT, 1: TEXT} == last
