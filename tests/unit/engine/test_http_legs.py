"""Legs: who may send one, what becomes of it, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import threading
from typing import Any

import aiohttp
import msgspec
import pytest

from pdcluster_engine.http.server_log import ServerLog
from pdcluster_engine.submission import Output, Submission
from pdcluster_protocol.authentication import HEADER, HttpSigner, KeyRing
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress, Role
from pdcluster_protocol.topology import Parallelism
from support.scripted_engine import (
    AUTHORITY,
    CONFIG,
    RING,
    WAIT_SECONDS,
    Fail,
    ScriptedEngine,
    Step,
    serving,
    spell,
)

PREFILL = msgspec.structs.replace(CONFIG, role=Role.PREFILL, instance="test-prefill-0")
SESSIONS = itertools.count()
ALLOW = msgspec.structs.replace(CONFIG, interop="Allow")
LEG = {
    "rid": "pd-1",
    "input_ids": [5, 6, 7],
    "max_tokens": 4,
    "bootstrap_host": "127.64.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 77,
    "pd_attempt": 1 << 40,
    "pd_budget_seconds": 9.5,
    "disagg_prefill_dp_rank": 0,
    "routed_dp_rank": 0,
}


def answering() -> ScriptedEngine:
    return ScriptedEngine(lambda submission: spell("abcdef", submission))


def signed(path: str, body: bytes, ring: KeyRing = RING) -> dict[str, str]:
    signer = HttpSigner(ring, f"session-{next(SESSIONS)}")
    return {
        HEADER: signer.sign("POST", path, body, authority=AUTHORITY),
        "Content-Type": "application/json",
    }


async def post(
    address: str, fields: dict[str, Any], *, sign: bool = True, path: str = "/v1/completions"
) -> tuple[int, Any, str]:
    body = json.dumps(fields).encode()
    headers = signed(path, body) if sign else {}
    async with (
        aiohttp.ClientSession(address) as client,
        client.post(path, data=body, headers=headers) as answer,
    ):
        text = await answer.text()
        reason = answer.headers.get("x-pd-reason", "")
        return answer.status, text if "data:" in text else json.loads(text), reason


async def test_a_signed_leg_becomes_a_submission() -> None:
    engine = answering()
    async with serving(engine) as address:
        status, answer, _ = await post(address, LEG)
    assert (200, "abcd", "pd-1") == (status, answer["choices"][0]["text"], answer["id"])
    submission = engine.submissions[0]
    assert (Key(77, 1 << 40), "pd-1", (5, 6, 7), True) == (
        submission.key,
        submission.rid,
        submission.token_ids,
        submission.attempt_known,
    )
    assert (RankAddress("127.64.0.1", 8998), 0, 9.5) == (
        submission.bootstrap,
        submission.prefill_dp_rank,
        submission.budget_seconds,
    )


async def test_an_unsigned_leg_is_refused_and_the_setting_named() -> None:
    engine = answering()
    async with serving(engine) as address:
        status, answer, reason = await post(address, LEG, sign=False)
    assert (401, "Unauthorized") == (status, reason)
    assert "security.interop" in answer["error"]["message"]
    assert [] == engine.submissions


@pytest.mark.parametrize("config", [CONFIG, ALLOW])
async def test_a_wrong_signature_is_refused_always(config: Any) -> None:
    engine = answering()
    body = json.dumps(LEG).encode()
    other = signed("/v1/completions", body, KeyRing({"k1": b"another key of sixteen bytes"}))
    for headers in (other, signed("/generate", body), signed("/v1/completions", body + b" ")):
        async with (
            serving(engine, config=config) as address,
            aiohttp.ClientSession(address) as client,
            client.post("/v1/completions", data=body, headers=headers) as answer,
        ):
            assert 401 == answer.status
    assert [] == engine.submissions


async def test_a_replayed_leg_is_refused() -> None:
    body = json.dumps(LEG).encode()
    headers = signed("/v1/completions", body)
    async with serving(answering()) as address, aiohttp.ClientSession(address) as client:
        statuses = []
        for _ in range(2):
            async with client.post("/v1/completions", data=body, headers=headers) as answer:
                statuses.append(answer.status)
    assert [200, 401] == statuses


async def test_routers_of_others_are_welcome_under_allow() -> None:
    engine = answering()
    fields = {"text": "x", "bootstrap_host": "10.0.0.1", "bootstrap_port": None}
    async with serving(engine, config=ALLOW) as address:
        status, _, _ = await post(
            address, {**fields, "bootstrap_room": 5}, sign=False, path="/generate"
        )
    assert 200 == status
    submission = engine.submissions[0]
    assert (Key(5, 0), False, RankAddress("10.0.0.1", 8998)) == (
        submission.key,
        submission.attempt_known,
        submission.bootstrap,
    )


async def test_a_list_of_rooms_becomes_single_sequences() -> None:
    engine = answering()
    fields = {
        "prompt": ["a", "b"],
        "bootstrap_host": ["10.0.0.1"] * 2,
        "bootstrap_port": [8998] * 2,
        "bootstrap_room": [9, 4],
    }
    async with serving(engine) as address:
        status, answer, _ = await post(address, fields)
    assert (200, 2) == (status, len(answer["choices"]))
    assert [9, 4] == [submission.key.room for submission in engine.submissions]


async def test_without_partner_and_for_health_checks_it_computes_alone() -> None:
    engine = answering()
    fake = {"text": "x", "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    async with serving(engine, config=PREFILL) as address:
        assert 200 == (await post(address, {"text": "x"}, sign=False, path="/generate"))[0]
        assert 200 == (await post(address, fake, sign=False, path="/generate"))[0]
    assert [None, None] == [submission.bootstrap for submission in engine.submissions]
    assert all(submission.key.room > 0 for submission in engine.submissions)


async def test_a_prefill_leg_is_answered_when_its_pages_were_taken() -> None:
    taken = threading.Event()
    engine = ScriptedEngine(lambda submission: [*spell("xyz", submission)[:1], taken])
    leg = {**LEG, "text": "x", "sampling_params": {"max_new_tokens": 4}}
    del leg["input_ids"]
    async with serving(engine, config=PREFILL) as address:
        waiting = asyncio.create_task(post(address, leg, path="/generate"))
        async with aiohttp.ClientSession(address) as client, client.get("/health"):
            pass
        assert not waiting.done()
        taken.set()
        status, answer, _ = await asyncio.wait_for(waiting, WAIT_SECONDS)
    assert (200, 1) == (status, len(answer["output_ids"]))
    assert {"type": "length", "length": 1} == answer["meta_info"]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_leg_that_fails_after_its_token_answers_with_the_reason(
    stream: bool,
) -> None:
    engine = ScriptedEngine(
        lambda submission: [
            spell("x", submission)[0],
            Fail(Reason.PEER_DIED, "decode test-decode-0 died"),
        ]
    )
    async with serving(engine, config=PREFILL) as address:
        status, answer, reason = await post(address, {**LEG, "stream": stream})
    assert (502, "PeerDied") == (status, reason)
    assert "decode test-decode-0 died" == answer["error"]["message"]


async def test_a_streamed_prefill_leg_is_one_event_and_the_end() -> None:
    engine = ScriptedEngine(lambda submission: spell("x", submission)[:1])
    async with serving(engine, config=PREFILL) as address:
        status, text, _ = await post(address, {**LEG, "stream": True})
    events = [line for line in text.split("\n\n") if line]
    assert (200, 2, "data: [DONE]") == (status, len(events), events[-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(stream: bool) -> None:
    engine = ScriptedEngine(lambda _submission: [Fail(Reason.BOOTSTRAP_TIMEOUT, "no metadata")])
    async with serving(engine) as address:
        status, answer, reason = await post(address, {**LEG, "stream": stream})
    assert (504, "BootstrapTimeout", "no metadata") == (
        status,
        reason,
        answer["error"]["message"],
    )


async def test_a_failure_inside_a_stream_is_its_last_event() -> None:
    gate = threading.Event()
    engine = ScriptedEngine(
        lambda submission: [
            *spell("ab", submission)[:1],
            gate,
            Fail(Reason.ENGINE_DIED, "gone"),
        ]
    )
    body = json.dumps({**LEG, "stream": True}).encode()
    async with (
        serving(engine) as address,
        aiohttp.ClientSession(address) as client,
        client.post(
            "/v1/completions", data=body, headers=signed("/v1/completions", body)
        ) as answer,
    ):
        first = await answer.content.readuntil(b"\n\n")
        gate.set()
        rest = await answer.content.read()
    assert b'"text":"a"' in first
    last = json.loads(rest.removeprefix(b"data: "))
    assert ("EngineDied", "gone") == (last["error"]["code"], last["error"]["message"])


async def test_one_failed_sequence_ends_the_others() -> None:
    def script(submission: Any) -> list[Any]:
        if submission.key.room == 9:
            return [Fail(Reason.STALLED, "no byte")]
        return [threading.Event()]

    engine = ScriptedEngine(script)
    fields = {"prompt": ["a", "b"], "bootstrap_host": "h", "bootstrap_room": [9, 4]}
    async with serving(engine) as address:
        status, _, reason = await post(address, fields)
    assert (504, "Stalled") == (status, reason)
    assert [Reason.ABORTED] == engine.wait_for_cancels(1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_sequences(stream: bool) -> None:
    engine = ScriptedEngine(lambda submission: [*spell("ab", submission)[:1], threading.Event()])
    body = json.dumps({"prompt": "x", "n": 3, "stream": stream}).encode()
    async with serving(engine) as address:
        host, port = address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        if stream:
            await asyncio.wait_for(reader.readuntil(b"data: "), WAIT_SECONDS)
        else:
            await asyncio.to_thread(engine.wait_for_submissions, 3)
        writer.close()
        await writer.wait_closed()
        reasons = await asyncio.to_thread(engine.wait_for_cancels, 3)
    assert [Reason.CLIENT_GONE] * 3 == reasons


async def test_a_leg_of_a_rank_that_is_none_is_refused() -> None:
    ranked = msgspec.structs.replace(PREFILL, parallel=Parallelism(tp=2, dp=2), dp_rank=1)
    decode = msgspec.structs.replace(ranked, role=Role.DECODE)
    async with serving(answering(), config=ranked) as address:
        status, answer, _ = await post(address, {**LEG, "disagg_prefill_dp_rank": 2})
    assert 409 == status
    assert "disagg_prefill_dp_rank is 2; test-prefill-0 has 2" in answer["error"]["message"]
    async with serving(answering(), config=decode) as address:
        status, answer, _ = await post(address, {**LEG, "routed_dp_rank": 2})
    assert 409 == status
    assert "routed_dp_rank is 2" in answer["error"]["message"]


async def test_a_leg_waits_for_no_sidecar_that_is_not_there() -> None:
    engine = answering()
    engine.joined = False
    async with serving(engine) as address:
        assert (503, "NotReady") == (await post(address, LEG))[::2]
        assert 200 == (await post(address, {"prompt": "x"}, sign=False))[0]


async def test_a_decode_leg_must_name_its_prefill() -> None:
    leg = {**LEG, "bootstrap_host": None}
    async with serving(answering()) as address:
        status, answer, _ = await post(address, leg)
    assert (400, "bootstrap_host") == (status, answer["error"]["param"])


async def test_a_client_that_takes_nothing_is_gone_after_the_stall_time_and_not_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts = msgspec.structs.replace(CONFIG.timeouts, stall_seconds=0.2)
    config = msgspec.structs.replace(CONFIG, timeouts=timeouts)

    def script(submission: Submission) -> list[Step]:
        # More than the kernel's buffers of both sides hold.
        long = Output(token_id=1, text="x" * (1 << 20), logprob=-1.0, top_logprobs=())
        return [*[long] * 32, threading.Event()]

    engine = ScriptedEngine(script)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(ServerLog, "emit", lambda _, record: logged.append(record))
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    async with serving(engine, config=config) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            reasons = await asyncio.to_thread(engine.wait_for_cancels, 1)
    assert [Reason.CLIENT_GONE] == reasons
    assert [] == logged
