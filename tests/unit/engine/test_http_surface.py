"""What stands beside the computing paths."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from datetime import datetime

import aiohttp
import pytest
from aiohttp import web

from pdcluster_engine.http import serve
from pdcluster_engine.http.tokens import TokenNames, vocabulary_bytes
from pdcluster_protocol.authentication import HEADER, HttpSigner
from pdcluster_protocol.errors import ConfigError, Reason
from support.scripted_engine import (
    AUTHORITY,
    CODEC,
    RING,
    WAIT_SECONDS,
    Fail,
    ScriptedEngine,
    Step,
    serving,
    spell,
)

SIGNER = HttpSigner(RING, "surface-tests")


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda submission: spell("abc", submission))


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(engine) as address, aiohttp.ClientSession(address) as client:
        yield client


async def abort(client: aiohttp.ClientSession, *, signed: bool = True, **fields: object) -> int:
    body = json.dumps(fields).encode()
    headers = (
        {HEADER: SIGNER.sign("POST", "/abort_request", body, authority=AUTHORITY)} if signed else {}
    )
    async with client.post("/abort_request", data=body, headers=headers) as answer:
        return answer.status


async def test_health_and_readiness(engine: ScriptedEngine, client: aiohttp.ClientSession) -> None:
    async with client.get("/health") as answer:
        assert (200, "OK") == (answer.status, await answer.text())
    async with client.get("/ready") as answer:
        assert (200, b"") == (answer.status, await answer.read())
    engine.ready = False
    async with client.get("/ready") as answer:
        assert (503, b"") == (answer.status, await answer.read())


async def test_health_generate_computes_one_token(
    engine: ScriptedEngine, client: aiohttp.ClientSession
) -> None:
    async with client.get("/health_generate") as answer:
        assert 200 == answer.status
    assert 1 == engine.submissions[0].output_tokens_max
    assert None is engine.submissions[0].bootstrap


async def test_health_generate_says_why_there_is_no_token() -> None:
    engine = ScriptedEngine(lambda _submission: [Fail(Reason.MODEL_FAILED, "no finite logit")])
    async with (
        serving(engine) as address,
        aiohttp.ClientSession(address) as client,
        client.get("/health_generate") as answer,
    ):
        assert 503 == answer.status
        assert "no finite logit" in await answer.text()


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_what_sglangs_router_parses(
    client: aiohttp.ClientSession, path: str
) -> None:
    async with client.get(path) as answer:
        shown = await answer.json()
    for name in ("tp_size", "dp_size", "max_total_num_tokens", "max_running_requests"):
        assert isinstance(shown[name], int), name
    assert ("tiny", "decode", 8998) == (
        shown["served_model_name"],
        shown["disaggregation_mode"],
        shown["disaggregation_bootstrap_port"],
    )
    assert 1 == len(shown["internal_states"])


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_says_it_generates(client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(path) as answer:
        shown = await answer.json()
    assert (True, "tiny") == (shown["is_generation"], shown["served_model_name"])


async def test_load_is_in_loads_and_in_every_answers_header(
    client: aiohttp.ClientSession,
) -> None:
    async with client.get("/v1/loads") as answer:
        shown = await answer.json()
        header = json.loads(answer.headers["x-pd-load"])
    load = shown["loads"][0]
    assert datetime.fromisoformat(shown["timestamp"]).tzinfo is not None
    assert (640, 2560, 3) == (
        load["num_used_tokens"],
        load["max_total_num_tokens"],
        load["num_waiting_reqs"],
    )
    assert (30, 40, 2, 3) == (
        header["pages_free"],
        header["pages_total"],
        header["rooms_open"],
        header["queued"],
    )


async def test_the_older_load_is_a_list_of_ranks_with_their_tokens(
    client: aiohttp.ClientSession,
) -> None:
    async with client.get("/get_load") as answer:
        [rank] = await answer.json()
    assert (0, 640, 3) == (rank["dp_rank"], rank["num_tokens"], rank["num_waiting_reqs"])


async def test_an_abort_ends_exactly_its_rid() -> None:
    def script(submission: object) -> list[Step]:
        return [threading.Event()]

    engine = ScriptedEngine(script)
    async with serving(engine) as address, aiohttp.ClientSession(address) as client:
        waiting = [
            asyncio.create_task(
                client.post("/generate", json={"text": ["x"] * count, "rid": rid}).__aenter__()
            )
            for rid, count in (("a", 1), ("ab", 1), ("many", 2))
        ]
        await asyncio.to_thread(engine.wait_for_submissions, 4)
        assert 401 == await abort(client, signed=False, rid="a")
        assert 200 == await abort(client, rid="")
        assert 200 == await abort(client, rid="unknown")
        assert 400 == await abort(client, rid="a", abort_all=True)
        assert 400 == await abort(client, rid=5)
        assert [] == engine.cancelled_rids()
        assert 200 == await abort(client, rid="a")
        answer = await asyncio.wait_for(waiting[0], WAIT_SECONDS)
        assert (500, "Aborted") == (answer.status, answer.headers["x-pd-reason"])
        assert ["a"] == engine.cancelled_rids()
        assert 200 == await abort(client, rid="many")
        await asyncio.wait_for(waiting[2], WAIT_SECONDS)
        assert ["a", "many_0", "many_1"] == engine.cancelled_rids()
        assert 200 == await abort(client, rid="ab")
        for task in waiting:
            (await asyncio.wait_for(task, WAIT_SECONDS)).release()


async def test_a_second_live_request_of_a_rid_is_refused() -> None:
    engine = ScriptedEngine(lambda _submission: [threading.Event()])
    async with serving(engine) as address, aiohttp.ClientSession(address) as client:
        body = {"text": ["x", "y"], "rid": "many"}
        first = asyncio.create_task(client.post("/generate", json=body).__aenter__())
        await asyncio.to_thread(engine.wait_for_submissions, 2)
        async with client.post("/generate", json=body) as answer:
            assert (400, "RidInUse") == (answer.status, answer.headers["x-pd-reason"])
        assert 200 == await abort(client, rid="many")
        (await asyncio.wait_for(first, WAIT_SECONDS)).release()


async def test_a_busy_port_is_named_with_the_remedy() -> None:
    runner = await serve(web.Application(), "127.0.0.1", 0)
    port = runner.addresses[0][1]
    with pytest.raises(ConfigError, match=f"http_port {port} on 127.0.0.1 is taken by another"):
        await serve(web.Application(), "127.0.0.1", port)
    await runner.cleanup()


def test_every_byte_token_has_a_name_of_its_own() -> None:
    names = TokenNames(CODEC)
    shown = [names.name(token) for token in range(257)]
    assert 257 == len({name.text for name in shown})
    assert set(range(256)) == {name.raw[0] for name in shown[:256] if name.raw}
    assert "<|end|>" == shown[256].text


def test_vocabularies_write_bytes_in_two_ways() -> None:
    assert b"\xe4" == vocabulary_bytes("<0xE4>")
    assert b" a" == vocabulary_bytes("Ġa")
    assert None is vocabulary_bytes("▁a")
    assert None is vocabulary_bytes(None)
