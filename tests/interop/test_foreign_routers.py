"""Routers that we did not write drive our pair, and their clients see one engine's own answers."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from typing import Any

import pytest

from pdcluster_protocol.ids import Role
from support.cluster import until
from support.foreign import Before
from support.model_runs import PagedModel
from support.prompts import prompt
from support.tap import Seen, Tap
from support.told import same, told

pytestmark = [
    pytest.mark.interop,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),
]

TOKENS = 12
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
PARALLEL = 32
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
OPENAI = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
PROBES = {
    "sglang-router": {"/health", "/server_info", "/model_info", "/get_load"},
    "smg": {"/health", "/v1/models", "/server_info", "/model_info", "/v1/loads"},
}
ABSENT = {"/version", "/loads"}
"""Paths of other engines, by whose absence a worker is known as SGLang's."""
HELLO = [{"role": "user", "content": "Hello there!"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
    {"role": "assistant", "content": "A machine."},
    {"role": "user", "content": "What for?"},
]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate-text": (GENERATE, {"text": "Hello there", "sampling_params": GREEDY}),
    "generate-ids": (GENERATE, {"input_ids": prompt(150), "sampling_params": GREEDY}),
    "generate-batch": (
        GENERATE,
        {"input_ids": [prompt(n) for n in (5, 64, 130)], "sampling_params": GREEDY},
    ),
    "generate-n": (GENERATE, {"text": "Twice", "sampling_params": {**GREEDY, "n": 2}}),
    "generate-named": (GENERATE, {"text": "Mine", "rid": "mine", "sampling_params": GREEDY}),
    "generate-logprobs": (
        GENERATE,
        {
            "input_ids": prompt(70),
            "sampling_params": GREEDY,
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
    ),
    "generate-seeded": (
        GENERATE,
        {"text": "Dice", "sampling_params": {**GREEDY, "temperature": 0.9, "sampling_seed": 7}},
    ),
    "completion": (COMPLETIONS, {**OPENAI, "prompt": "Hello there"}),
    "completion-batch": (COMPLETIONS, {**OPENAI, "prompt": ["Hello", "there", "you"]}),
    "completion-n": (COMPLETIONS, {**OPENAI, "prompt": "Hello", "n": 2}),
    "completion-batch-n": (COMPLETIONS, {**OPENAI, "prompt": ["Hello", "you"], "n": 2}),
    "completion-logprobs": (COMPLETIONS, {**OPENAI, "prompt": "Hello", "logprobs": 2}),
    "completion-seeded": (
        COMPLETIONS,
        {**OPENAI, "prompt": "Hello", "temperature": 0.9, "top_p": 0.95, "seed": 3},
    ),
    "completion-stop": (COMPLETIONS, {**OPENAI, "prompt": "Hello", "stop": ["\x00\x00"]}),
    "chat": (CHAT, {**OPENAI, "messages": HELLO}),
    "chat-turns": (CHAT, {**OPENAI, "messages": TALK}),
    "chat-n": (CHAT, {**OPENAI, "messages": HELLO, "n": 3, "temperature": 0.9, "seed": 5}),
    "chat-logprobs": (CHAT, {**OPENAI, "messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    "chat-newer-limit": (
        CHAT,
        {"model": "tiny", "temperature": 0, "max_completion_tokens": 9, "messages": HELLO},
    ),
}


async def ask(foreign: Before, base: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with foreign.post(base, path, body) as answer:
        return answer.status, await told(answer)


async def check(foreign: Before, path: str, body: dict[str, Any]) -> None:
    """The router's answer is that of one engine alone."""
    status, expected = await ask(foreign, foreign.alone, path, body)
    assert 200 == status, expected
    status, seen = await ask(foreign, foreign.router.url, path, body)
    assert 200 == status, seen
    assert same(expected, seen), f"\nexpected {expected}\nseen     {seen}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
async def test_a_request_is_answered_as_by_one_engine(
    foreign: Before, case: str, *, stream: bool
) -> None:
    path, body = CASES[case]
    usage = {"stream_options": {"include_usage": True}} if stream and path != GENERATE else {}
    await check(foreign, path, {**body, "stream": stream, **usage})

    [prefill], [decode] = (foreign.taps[role].legs for role in Role)
    assert (200, 200) == (prefill.status, decode.status)
    assert prefill.raw == decode.raw


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (GENERATE, CASES["generate-batch"][1], 3),
        (COMPLETIONS, CASES["completion-batch"][1], 3),
        (CHAT, CASES["chat-n"][1], 3),
    ],
    ids=["generate", "completion", "chat"],
)
async def test_a_batch_comes_as_a_list_of_rooms(
    foreign: Before, path: str, body: dict[str, Any], count: int
) -> None:
    status, _ = await ask(foreign, foreign.router.url, path, body)

    assert 200 == status
    for role in Role:
        [leg] = foreign.taps[role].legs
        assert count == len(leg.body["bootstrap_room"]) == len(set(leg.rooms))


async def test_thirty_two_in_parallel_have_their_own_texts_and_only_prefill_computed_prompts(
    foreign: Before,
) -> None:
    draw = random.Random(20)
    lengths = [draw.randrange(1, 400) for _ in range(PARALLEL)]
    asked = [mixed(index, prompt(length)) for index, length in enumerate(lengths)]
    expected = [await ask(foreign, foreign.alone, *one) for one in asked]
    before = {role: await foreign.cluster.metrics(role) for role in Role}

    seen = await asyncio.gather(*(ask(foreign, foreign.router.url, *one) for one in asked))

    for index, (one, other) in enumerate(zip(expected, seen, strict=True)):
        assert 200 == other[0], (index, other)
        assert same(one, other), index
    after = {role: await foreign.cluster.metrics(role) for role in Role}

    def grown(role: Role, name: str) -> float:
        return after[role].get(name, 0.0) - before[role].get(name, 0.0)

    computed = "pdcluster_prompt_tokens_computed_total"
    tokens = grown(Role.PREFILL, computed)
    assert 0 < tokens
    assert 0 == grown(Role.DECODE, computed)
    moved = tokens * PagedModel(foreign.cluster.model).layout.bytes_per_token
    assert moved == grown(Role.PREFILL, 'pdcluster_kv_bytes_total{kind="kv"}')


@pytest.mark.parametrize("first", list(Role))
async def test_either_leg_may_come_first(foreign: Before, first: Role) -> None:
    """The second one is held until the room of the first is open and waits for it."""

    async def once_the_first_is_in(_leg: Seen) -> None:
        await until(partial(room_open, foreign, first), "the first leg in")

    with foreign.taps[OTHER[first]].ruled(once_the_first_is_in):
        for stream in (False, True):
            await check(foreign, *mixed(int(not stream), prompt(100)))


@pytest.mark.parametrize("doubled", list(Role))
async def test_a_room_that_comes_twice_is_refused_and_tried_anew(
    foreign: Before, doubled: Role
) -> None:
    tap = foreign.taps[doubled]

    async def refused() -> bool:
        return any(leg.status for leg in tap.legs)

    async def behind_the_refusal(_leg: Seen) -> None:
        # Else the copy could be served before its double comes.
        await until(refused, "refused")

    async with tap.copies() as copy:

        async def behind_a_copy(leg: Seen) -> None:
            if leg is tap.legs[0]:
                copy(leg)
                await until(partial(room_open, foreign, doubled), "the copy in")

        with tap.ruled(behind_a_copy), foreign.taps[OTHER[doubled]].ruled(behind_the_refusal):
            await check(foreign, *CASES["generate-ids"])

    first, *_, last = tap.legs
    assert (503, "RoomInUse", 200) == (first.status, first.reason, last.status)
    assert first.rooms != last.rooms


@pytest.mark.parametrize("cut", list(Role))
async def test_a_cut_connection_still_ends_in_the_right_answer(foreign: Before, cut: Role) -> None:
    """The engine goes on with the leg; some routers send the same one again at once."""
    tap = foreign.taps[cut]
    async with tap.copies() as copy:

        async def cut_behind_the_engine(leg: Seen) -> None:
            if leg is tap.legs[0]:
                copy(leg)
                await until(partial(room_open, foreign, cut), "the leg in")
                raise ConnectionResetError

        with tap.ruled(cut_behind_the_engine):
            await check(foreign, *CASES["generate-ids"])

    assert 2 <= len(tap.legs)


async def test_a_client_that_leaves_a_stream_leaves_nothing_behind(foreign: Before) -> None:
    body = {"input_ids": prompt(90), "sampling_params": {**GREEDY, "max_new_tokens": 4000}}
    for _ in range(8):
        async with foreign.post(foreign.router.url, GENERATE, {**body, "stream": True}) as answer:
            await answer.content.readline()
            answer.close()
    await foreign.cluster.wait_idle()
    await check(foreign, *CASES["generate-ids"])


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (GENERATE, {"sampling_params": {"max_new_tokens": 100_000}}, "max_new_tokens is 100000"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 100_000}, "max_tokens is 100000"),
        (CHAT, {"messages": HELLO, "logit_bias": {"5": 1.0}}, "logit_bias"),
    ],
    ids=["generate", "completion", "chat"],
)
async def test_a_refusal_keeps_its_words_and_is_not_tried_again(
    foreign: Before, path: str, change: dict[str, Any], words: str
) -> None:
    base = {"text": "x"} if path == GENERATE else {"model": "tiny"}
    status, answer = await ask(foreign, foreign.router.url, path, {**base, **change})

    assert 400 == status
    assert words in str(answer)
    assert 1 == len(foreign.taps[Role.DECODE].legs)


async def test_everything_that_they_probe_is_answered(foreign: Before) -> None:
    name = foreign.router.name
    assert 200 == (await foreign.get("/get_loads"))[0]
    for tap in foreign.taps.values():

        async def probed(tap: Tap = tap) -> bool:
            return PROBES[name] <= tap.probed.keys()

        await until(probed, f"all of {sorted(PROBES[name])} asked")
        asked = {path: status for path, status in tap.probed.items() if path not in ABSENT}
        assert dict.fromkeys(asked, 200) == asked


async def test_the_load_of_each_worker_is_understood(foreign: Before) -> None:
    if foreign.router.name == "sglang-router":
        _, shown = await foreign.get("/get_loads")
        assert [0, 0] == [worker["load"] for worker in json.loads(shown)["workers"]]
        return
    # It tells nobody but its log.
    lines = [
        f"Fetched loads from 1/1 polled workers in group tiny:{role.value}:http" for role in Role
    ]

    async def told_by_its_log() -> bool:
        log = foreign.router.log.read_text(errors="replace")
        return all(line in log for line in lines)

    await until(told_by_its_log, "said in its log")


def mixed(index: int, ids: list[int]) -> tuple[str, dict[str, Any]]:
    """Every path, whole and streamed, in turn."""
    text = "".join(chr(32 + token % 90) for token in ids)
    body: dict[str, Any]
    match index % 3:
        case 0:
            path, body = GENERATE, {"input_ids": ids, "sampling_params": GREEDY}
        case 1:
            path, body = COMPLETIONS, {**OPENAI, "prompt": text}
        case _:
            path, body = CHAT, {**OPENAI, "messages": [{"role": "user", "content": text}]}
    return path, {**body, "stream": index % 2 == 0}


async def room_open(foreign: Before, role: Role) -> bool:
    """Whether an engine has a leg that waits for its partner, or is under way."""
    values = await foreign.cluster.metrics(role)
    return values['pdcluster_queue{queue="rooms"}'] > 0
