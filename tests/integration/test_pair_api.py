"""The unchanged `openai` SDK against a whole cluster, and what a client must not send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pdcluster_engine.model.builtin import END_ID, byte_codec
from pdcluster_protocol.ids import Role
from support.cluster import TIMEOUT, PairCluster
from support.oracle import Expected, expected
from support.prompts import prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MODEL = "tiny"
CODEC = byte_codec()
CHUNK = 256
MAX_CONTEXT = 8192
ASKED = "Tell me, in one word: what is a key, what is a value?"
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[PairCluster]:
    with PairCluster(model="tiny-glm", mode="exact", chunk=CHUNK) as started:
        yield started


@pytest.fixture
async def client(cluster: PairCluster) -> AsyncIterator[AsyncOpenAI]:
    url = f"{cluster.run.endpoint}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def oracle(ids: list[int], tokens: int, *, tops: int = 1) -> Expected:
    """What the model says, up to its end token, which has no text."""
    answer = expected("tiny-glm", ids, tokens, chunk=CHUNK, tops=tops)
    length = answer.ids.index(END_ID) + 1 if END_ID in answer.ids else tokens
    return Expected(answer.ids[:length], answer.tops[:length])


def text_of(ids: list[int], tokens: int) -> str:
    return CODEC.decode(oracle(ids, tokens).ids)


# --- what the SDK gets ----------------------------------------------------------------------------


async def test_a_completion_is_the_models_own_and_its_logprobs_are_exact(
    client: AsyncOpenAI,
) -> None:
    ids = CODEC.encode(ASKED)
    answer = await client.completions.create(
        model=MODEL, prompt=ASKED, max_tokens=40, temperature=0, logprobs=3
    )

    choice, wanted = answer.choices[0], oracle(ids, 40, tops=3)
    # This prompt's answer ends by itself.
    assert END_ID == wanted.ids[-1]
    assert (CODEC.decode(wanted.ids), "stop") == (choice.text, choice.finish_reason)
    assert choice.logprobs is not None
    assert [step[0][0] for step in wanted.tops] == choice.logprobs.token_logprobs
    assert choice.logprobs.top_logprobs is not None
    seen = [list(step.values()) for step in choice.logprobs.top_logprobs]
    assert [[logprob for logprob, _ in step] for step in wanted.tops] == seen
    assert answer.usage is not None
    assert len(ids) == answer.usage.prompt_tokens
    assert len(wanted.ids) == answer.usage.completion_tokens


async def test_a_stream_adds_up_to_the_whole_answer(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL,
        prompt=ASKED,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert text_of(CODEC.encode(ASKED), 20) == "".join(texts)
    assert "length" == chunks[-2].choices[0].finish_reason
    assert len(texts) > 5
    assert chunks[-1].usage is not None
    assert 20 == chunks[-1].usage.completion_tokens


async def test_token_ids_are_a_prompt_and_a_stop_string_ends_the_text(client: AsyncOpenAI) -> None:
    ids = prompt(130)
    whole = text_of(ids, 40)
    stop = whole[12:14]
    answer = await client.completions.create(
        model=MODEL, prompt=ids, max_tokens=40, temperature=0, stop=stop
    )

    choice = answer.choices[0]
    assert (whole[: whole.index(stop)], "stop") == (choice.text, choice.finish_reason)


async def test_samples_have_seeds_of_their_own_and_come_again(client: AsyncOpenAI) -> None:
    async def ask(seed: int, n: int) -> list[str]:
        answer = await client.completions.create(
            model=MODEL, prompt=ASKED, max_tokens=16, temperature=1, seed=seed, n=n
        )
        assert answer.usage is not None
        assert len(CODEC.encode(ASKED)) == answer.usage.prompt_tokens
        return [choice.text for choice in answer.choices]

    two = await ask(7, 2)
    assert two[0] != two[1]
    assert two == [*await ask(7, 1), *await ask(8, 1)]


async def test_a_chat_and_its_stream_say_the_same(client: AsyncOpenAI) -> None:
    asked = CODEC.encode(CODEC.render_chat(CHAT), add_special_tokens=False)
    wanted = text_of(asked, 24)
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=24, temperature=0, logprobs=True
    )
    stream = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=24, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]

    message = answer.choices[0].message
    assert ("assistant", wanted) == (message.role, message.content)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tops = oracle(asked, 24).tops
    assert [top[0][0] for top in tops] == [token.logprob for token in logprobs.content or []]
    assert "assistant" == deltas[0].role
    assert wanted == "".join(delta.content or "" for delta in deltas)


async def test_the_plain_client_works_in_a_thread(cluster: PairCluster) -> None:
    def ask() -> str:
        url = f"{cluster.run.endpoint}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert [MODEL] == [model.id for model in client.models.list()]
            answer = client.completions.create(
                model=MODEL, prompt=ASKED, max_tokens=9, temperature=0
            )
            return answer.choices[0].text

    assert text_of(CODEC.encode(ASKED), 9) == await asyncio.to_thread(ask)


async def test_errors_are_the_sdks_own(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", max_tokens=0)
    assert ("max_tokens", "InvalidRequest") == (bad.value.param, bad.value.code)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=CHAT)
    assert ("model", "ModelNotFound") == (missing.value.param, missing.value.code)


# --- what a client must not send ------------------------------------------------------------------

COMPLETION = {"model": MODEL, "prompt": "x", "max_tokens": 4}
REFUSED: list[tuple[str, dict[str, Any] | bytes, int, list[str]]] = [
    # path, body, status, and the words of the message: field, value, fix
    (
        "/v1/completions",
        {**COMPLETION, "prompt": prompt(MAX_CONTEXT + 1)},
        400,
        ["prompt", str(MAX_CONTEXT + 1), str(MAX_CONTEXT)],
    ),
    ("/v1/completions", {**COMPLETION, "model": "other"}, 404, ["model", "other", MODEL]),
    ("/v1/completions", {**COMPLETION, "prompt": 5}, 400, ["prompt", "5", "string"]),
    ("/v1/completions", {**COMPLETION, "prompt": [1, "a"]}, 400, ["prompt", "a", "ids"]),
    ("/v1/completions", {**COMPLETION, "prompt": [1, 99999]}, 400, ["prompt", "99999", "263"]),
    ("/v1/completions", {**COMPLETION, "temperature": "hot"}, 400, ["temperature", "hot"]),
    ("/v1/completions", {**COMPLETION, "stream": "yes"}, 400, ["stream", "yes", "true"]),
    ("/v1/completions", {**COMPLETION, "top_p": 1.5}, 400, ["top_p", "1.5", "(0, 1]"]),
    ("/v1/completions", {**COMPLETION, "prompt": ""}, 400, ["prompt", "empty", "one token"]),
    ("/v1/completions", {**COMPLETION, "prompt": []}, 400, ["prompt", "empty", "one token"]),
    ("/v1/completions", {"model": MODEL}, 400, ["prompt", "missing"]),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, ["messages", "[]", "one"]),
    ("/v1/chat/completions", {"model": MODEL, "messages": "hi"}, 400, ["messages", "hi", "list"]),
    ("/v1/completions", {**COMPLETION, "max_tokens": 0}, 400, ["max_tokens", "0", "1"]),
    ("/v1/completions", {**COMPLETION, "max_tokens": -3}, 400, ["max_tokens", "-3", "1"]),
    (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 0}},
        400,
        ["sampling_params.max_new_tokens", "0", "1"],
    ),
    ("/v1/completions", {**COMPLETION, "tools": [{}]}, 400, ["tools", "not supported"]),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"1": 2}}, 400, ["logit_bias"]),
    ("/v1/completions", b'{"model": "tiny", "prompt": ', 400, ["body", "not JSON"]),
    ("/v1/completions", b"[1, 2]", 400, ["body", "[1, 2]", "object"]),
    ("/v1/completions", b'{"prompt": "\xff"}', 400, ["body", "not JSON"]),
    ("/v1/completions", b" " * ((16 << 20) + 1), 413, ["body", "16777216"]),
    ("/v1/embeddings", COMPLETION, 404, ["/v1/embeddings"]),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
async def test_bad_input_is_refused_before_any_engine_hears_of_it(
    cluster: PairCluster, index: int
) -> None:
    path, body, status, words = REFUSED[index]
    before = [await legs(cluster, role) for role in Role]

    seen, answer = await cluster.post(path, body)

    assert status == seen, answer
    error = answer["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    for word in words:
        assert word in error["message"], error["message"]
    assert before == [await legs(cluster, role) for role in Role]
    assert await cluster.idle()


async def legs(cluster: PairCluster, role: Role) -> float:
    """How many legs an engine has ended so far, whatever came of them."""
    values = await cluster.metrics(role)
    return sum(n for name, n in values.items() if name.startswith("pdcluster_requests_total"))


async def test_rooms_and_hosts_of_a_client_are_never_trusted(cluster: PairCluster) -> None:
    """They are dropped: the answer is right, and no engine has seen them."""
    forged = {
        "rid": "mine",
        "bootstrap_host": "127.0.0.9",
        "bootstrap_port": 1,
        "bootstrap_room": 4242,
        "routed_dp_rank": 3,
        "disagg_prefill_dp_rank": 3,
        "pd_attempt": 77,
        "pd_budget_seconds": 0.001,
    }
    ids = prompt(100)
    status, answer = await cluster.post("/generate", cluster.body(ids, 8, **forged))

    assert 200 == status, answer
    assert oracle(ids, 8).ids == answer["output_ids"]
    rooms = {json.loads(line)["room"] for line in cluster.logs().splitlines() if '"room"' in line}
    assert rooms
    assert 4242 not in rooms
    assert "127.0.0.9" not in cluster.logs()
    assert "mine" != answer["meta_info"]["id"]


async def test_a_body_without_an_end_is_cut_at_the_limit(cluster: PairCluster) -> None:
    """No length is announced, so only counting can tell."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * (1 << 20)

    url = f"{cluster.run.endpoint}/v1/completions"
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url, data=endless()) as answer,
    ):
        assert 413 == answer.status
        assert "TooLarge" == (await answer.json())["error"]["code"]
    assert await cluster.idle()
