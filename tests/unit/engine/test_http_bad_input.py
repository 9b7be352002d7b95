"""What is wrong gets a 4xx in one shape, before the engine hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from pdcluster_protocol.limits import Limits
from support.scripted_engine import WAIT_SECONDS, ScriptedEngine, serving, spell


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda submission: spell("abc", submission))


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(engine) as address, aiohttp.ClientSession(address) as client:
        yield client


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", **fields}).encode()


@pytest.mark.parametrize(
    ("body", "status", "code", "detail"),
    [
        (b"{", 400, "InvalidRequest", "the body is not JSON"),
        (b"[]", 400, "InvalidRequest", "it must be a JSON object"),
        (b"\xff", 400, "InvalidRequest", "the body is not JSON"),
        (completion(prompt="x" * 300), 400, "TooLarge", "the prompt has 300 tokens"),
        (completion(prompt=[1] * 256), 400, "TooLarge", "it must have at most 255"),
        (completion(max_tokens=252), 400, "TooLarge", "it must be at most 251"),
        (completion(model="other"), 404, "ModelNotFound", "it must be tiny"),
        (completion(temperature="hot"), 400, "InvalidRequest", 'temperature is "hot"'),
        (completion(prompt=""), 400, "InvalidRequest", "prompt is empty"),
        (completion(prompt=[257]), 400, "InvalidRequest", "ids must be in [0, 256]"),
        (completion(max_tokens=0), 400, "InvalidRequest", "max_tokens is 0"),
        (completion(max_tokens=-1), 400, "InvalidRequest", "max_tokens is -1"),
        (completion(bootstrap_room="x"), 400, "InvalidRequest", 'bootstrap_room is "x"'),
        (completion(bootstrap_room=7), 401, "Unauthorized", "bootstrap_room names a partner"),
        (completion(logit_bias={"1": 2}), 400, "Unsupported", "logit_bias is"),
    ],
)
async def test_bad_input_is_refused_before_the_engine(
    engine: ScriptedEngine,
    client: aiohttp.ClientSession,
    body: bytes,
    status: int,
    code: str,
    detail: str,
) -> None:
    async with client.post("/v1/completions", data=body) as answer:
        error = (await answer.json())["error"]
        assert (status, code) == (answer.status, error["code"])
        assert code == answer.headers["x-pd-reason"]
    assert detail in error["message"]
    assert {"message", "type", "code", "param"} == set(error)
    assert [] == engine.submissions


async def test_a_body_over_the_limit_is_too_large(
    engine: ScriptedEngine, client: aiohttp.ClientSession
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(Limits().body_bytes_max // (1 << 20) + 1):
            yield b" " * (1 << 20)

    async with client.post("/generate", data=pieces()) as answer:
        assert (413, "TooLarge") == (answer.status, (await answer.json())["error"]["code"])
    assert [] == engine.submissions


async def test_malformed_http_is_answered_and_not_logged(
    engine: ScriptedEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving(engine) as address:
        host, port = address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nContent-Length: -5\r\n\r\n")
        answer = await asyncio.wait_for(reader.readline(), WAIT_SECONDS)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize("path", ["/v1/completions", "/abort_request"])
async def test_a_body_that_does_not_decode_is_refused_and_not_logged(
    client: aiohttp.ClientSession, capfd: pytest.CaptureFixture[str], path: str
) -> None:
    # `compress=False`: the body is sent as it is, whatever the header claims.
    headers = {"Content-Encoding": "gzip"}
    async with client.post(path, data=completion(), headers=headers, compress=False) as answer:
        error = (await answer.json())["error"]
    assert (400, "InvalidRequest") == (answer.status, error["code"])
    assert "without content-encoding" in error["message"]
    assert ("", "") == capfd.readouterr()


async def test_unknown_paths_and_methods_are_json_too(client: aiohttp.ClientSession) -> None:
    async with client.get("/v1/nothing") as answer:
        assert (404, "InvalidRequest") == (answer.status, (await answer.json())["error"]["code"])
    async with client.get("/v1/completions") as answer:
        assert (405, "POST") == (answer.status, answer.headers["Allow"])
        assert "use POST" in (await answer.json())["error"]["message"]


async def test_a_refused_request_is_counted_by_reason(client: aiohttp.ClientSession) -> None:
    async with client.post("/v1/completions", data=b"{"):
        pass
    async with client.post("/v1/completions", data=completion()):
        pass
    async with client.get("/metrics") as answer:
        text = await answer.text()
    role = 'role="decode"'
    refused = f'pdcluster_requests_total{{outcome="refused",reason="InvalidRequest",{role}}} 1.0'
    assert refused in text
    assert f'pdcluster_requests_total{{outcome="ok",reason="",{role}}} 1.0' in text
    assert f'pdcluster_phase_seconds_count{{phase="first_token",{role}}} 1.0' in text
