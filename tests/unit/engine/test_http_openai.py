"""The unchanged `openai` SDK against the engine's HTTP side."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from pdcluster_protocol.errors import Overloaded, Reason, RequestFailed
from support.scripted_engine import CODEC, ScriptedEngine, logprob, serving, spell

TEXT = "Grüße, 世界! And more."


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda submission: spell(TEXT, submission, ends=True))


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[AsyncOpenAI]:
    async with (
        serving(engine) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_a_completion_is_what_the_sdk_expects(
    engine: ScriptedEngine, client: AsyncOpenAI
) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=100, temperature=0, seed=7
    )
    choice = answer.choices[0]
    tokens = len(CODEC.encode(TEXT))
    assert (TEXT, "stop", 0, None) == (
        choice.text,
        choice.finish_reason,
        choice.index,
        choice.logprobs,
    )
    assert answer.usage is not None
    assert (5, tokens, 5 + tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    )
    assert ("text_completion", "tiny") == (answer.object, answer.model)
    submission = engine.submissions[0]
    assert (tuple(CODEC.encode("hello")), 100, 0.0, 7) == (
        submission.token_ids,
        submission.output_tokens_max,
        submission.sampling.temperature,
        submission.sampling.seed,
    )
    assert submission.bootstrap is None
    assert submission.rid == answer.id


async def test_a_completion_ends_by_its_bound(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=3)
    assert ("length", "Gr�") == (answer.choices[0].finish_reason, answer.choices[0].text)


async def test_a_stop_string_is_not_part_of_the_text(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=100, stop=["界", "never"]
    )
    assert ("stop", "Grüße, 世") == (answer.choices[0].finish_reason, answer.choices[0].text)


async def test_a_stream_adds_up_to_the_same_text(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert TEXT == "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert "stop" == chunks[-2].choices[0].finish_reason
    assert [] == chunks[-1].choices
    assert chunks[-1].usage is not None
    assert len(CODEC.encode(TEXT)) == chunks[-1].usage.completion_tokens
    assert 1 == len({chunk.id for chunk in chunks})


async def test_completion_logprobs_are_exact_and_hide_no_token(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=4, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert ["G", "r", "bytes:\\xc3", "bytes:\\xbc"] == logprobs.tokens
    assert [logprob(index) for index in range(4)] == logprobs.token_logprobs
    assert logprobs.top_logprobs is not None
    assert [logprob(1 + other) for other in range(3)] == list(logprobs.top_logprobs[1].values())
    assert [0, 1, 2, 2] == logprobs.text_offset


async def test_n_samples_have_seeds_of_their_own(
    engine: ScriptedEngine, client: AsyncOpenAI
) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b"], n=2, max_tokens=2, seed=10
    )
    assert [0, 1, 2, 3] == [choice.index for choice in answer.choices]
    assert [10, 11, 10, 11] == [s.sampling.seed for s in engine.submissions]
    assert 4 == len({s.key for s in engine.submissions})
    assert answer.usage is not None
    assert (2, 8) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)


async def test_a_chat_is_rendered_and_answered(engine: ScriptedEngine, client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}]
    )
    choice = answer.choices[0]
    assert (TEXT, "assistant", "stop") == (
        choice.message.content,
        choice.message.role,
        choice.finish_reason,
    )
    assert "user:hi;" == CODEC.decode(engine.submissions[0].token_ids)
    assert 256 - len("user:hi;") == engine.submissions[0].output_tokens_max


async def test_a_chat_stream_begins_with_the_role(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices]
        own = [choice for choice in own if choice.index == index]
        assert "assistant" == own[0].delta.role
        assert TEXT == "".join(choice.delta.content or "" for choice in own)
        assert "stop" == own[-1].finish_reason
        assert all(choice.finish_reason is None for choice in own[:-1])
    assert chunks[-1].usage is not None
    assert 8 == chunks[-1].usage.prompt_tokens


async def test_chat_logprobs_carry_bytes(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    joined = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert "Grüß".encode()[:5] == joined
    assert [logprob(index) for index in range(5)] == [t.logprob for t in logprobs.content]
    assert [2] * 5 == [len(token.top_logprobs) for token in logprobs.content]


async def test_models_are_listed_and_found(client: AsyncOpenAI) -> None:
    assert ["tiny"] == [model.id async for model in client.models.list()]
    assert "tiny" == (await client.models.retrieve("tiny")).id
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_errors_arrive_as_the_sdks_own(engine: ScriptedEngine, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r'model is \\?"other\\?"; it must be tiny'):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="x", max_tokens=0)
    assert ("max_tokens", "InvalidRequest") == (bad.value.param, bad.value.code)
    engine.refusal = RequestFailed("room 5 has a live request", reason=Reason.ROOM_IN_USE)
    with pytest.raises(openai.InternalServerError) as busy:
        await client.completions.create(model="tiny", prompt="x")
    assert (503, "RoomInUse") == (busy.value.status_code, busy.value.code)
    assert "RoomInUse" == busy.value.response.headers["x-pd-reason"]
    assert "1" == busy.value.response.headers["retry-after"]


async def test_a_full_engine_says_too_many_requests(
    engine: ScriptedEngine, client: AsyncOpenAI
) -> None:
    engine.refusal = Overloaded("full")
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="tiny", prompt="x")
