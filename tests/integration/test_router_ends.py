"""How requests end: legs that fail in every order, clients that leave or do not read, deaths."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.limits import Timeouts
from support.canned import (
    DEADLINE_SECONDS,
    Behaviour,
    CannedWorker,
    Leg,
    World,
    answer,
    begin_stream,
    events_of,
    hang_up,
    never,
    refuse,
    stream_then,
    world,
)

PROMPT: dict[str, Any] = {"prompt": "hello"}


async def complete(here: World, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and JSON of one request that must end soon."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(here.url + "/v1/completions", json=PROMPT | fields) as response,
    ):
        return response.status, json.loads(await response.read())


async def streamed(here: World) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(here.url + "/v1/completions", json=PROMPT | {"stream": True}) as response,
    ):
        return await response.text()


def key_of(leg: Leg) -> Key:
    return Key(leg.body["bootstrap_room"], leg.body["pd_attempt"])


async def wait_aborted(worker: CannedWorker, leg: Leg) -> None:
    """The worker's sidecar was told to end exactly this leg."""
    await worker.wait_for(
        lambda: any((a.rid, a.key) == (leg.body["rid"], key_of(leg)) for a in worker.aborts)
    )


@pytest.mark.parametrize(
    ("role", "stream"), list(itertools.product([Role.PREFILL, Role.DECODE], [False, True]))
)
async def test_a_leg_that_fails_ends_the_other_and_is_named(
    tmp_path: Path, role: Role, *, stream: bool
) -> None:
    async with world(tmp_path) as here:
        failing, other = here.prefill, here.decode
        if role is Role.DECODE:
            failing, other = other, failing
        failing.behaviour = refuse(500, "ModelFailed", message="it broke")
        other.behaviour = never

        status, body = await complete(here, stream=stream)

        error = body["error"]
        assert (500, "ModelFailed", str(role)) == (status, error["code"], error["leg"])
        assert "it broke" in error["message"]
        (leg,) = other.legs
        await asyncio.wait_for(leg.gone.wait(), DEADLINE_SECONDS)
        await wait_aborted(other, leg)


@pytest.mark.parametrize("status", [400, 409, 429])
async def test_an_engines_refusal_reaches_the_client_with_its_status(
    tmp_path: Path, status: int
) -> None:
    async with world(tmp_path, retries=3) as here:
        here.prefill.behaviour = refuse(status, "StaleAttempt")
        here.decode.behaviour = never

        assert status == (await complete(here))[0]
        # What is wrong with the request is wrong with every pair.
        assert 1 == len(here.prefill.legs)


async def test_the_true_cause_is_answered_when_its_symptom_comes_first(tmp_path: Path) -> None:
    told = asyncio.Event()

    async def symptom(leg: Leg, request: web.Request) -> web.StreamResponse:
        told.set()
        return await refuse(500, "PeerFailed")(leg, request)

    async def truth(leg: Leg, request: web.Request) -> web.StreamResponse:
        await told.wait()
        await here.prefill.wait_for(lambda: bool(here.prefill.aborts))
        return await refuse(500, "ChecksumMismatch")(leg, request)

    async with world(tmp_path, retries=0) as here:
        here.decode.behaviour, here.prefill.behaviour = symptom, truth

        _, body = await complete(here)

        assert ("ChecksumMismatch", "prefill") == (body["error"]["code"], body["error"]["leg"])


async def test_a_symptom_alone_is_answered_soon(tmp_path: Path) -> None:
    async with world(tmp_path, retries=0) as here:
        here.decode.behaviour, here.prefill.behaviour = refuse(500, "PeerFailed"), never

        _, body = await complete(here)

        assert ("PeerFailed", "decode") == (body["error"]["code"], body["error"]["leg"])


@pytest.mark.parametrize("reason", ["RoomInUse", "NotReady", "ShuttingDown"])
async def test_a_refused_try_is_repeated_under_a_new_room(tmp_path: Path, reason: str) -> None:
    async with world(tmp_path) as here:
        here.prefill.behaviour = once(refuse(503, reason), answer)

        assert 200 == (await complete(here))[0]
        first, second = here.prefill.legs
        assert key_of(first) != key_of(second)
        # The first try may not have ended yet where the second one arrives.
        assert f"{first.body['rid']}-try1" == second.body["rid"]


async def test_an_engine_that_hangs_up_is_tried_again_and_then_named(tmp_path: Path) -> None:
    async with world(tmp_path, retries=1) as here:
        here.decode.behaviour = hang_up

        status, body = await complete(here)

        assert (502, "EngineDied", "decode") == (
            status,
            body["error"]["code"],
            body["error"]["leg"],
        )
        assert 2 == len(here.decode.legs)


async def test_an_engine_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    async with world(tmp_path, retries=0) as here:
        await here.prefill.kill_engines()

        status, body = await complete(here)

        assert (502, "PeerUnreachable", "prefill") == (
            status,
            body["error"]["code"],
            body["error"]["leg"],
        )


async def test_a_dead_incarnation_ends_its_requests_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, retries=0) as here:
        here.prefill.behaviour = never
        here.decode.behaviour = never
        request = asyncio.create_task(complete(here))
        await here.prefill.wait_for(lambda: bool(here.prefill.legs))

        here.prefill.incarnation = "another"
        status, body = await request

        assert (502, "EngineDied", "prefill") == (
            status,
            body["error"]["code"],
            body["error"]["leg"],
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs(tmp_path: Path, *, stream: bool) -> None:
    async with world(tmp_path) as here:
        here.prefill.behaviour = never
        here.decode.behaviour = stream_then(events=1, end=never) if stream else never
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(
                session.post(here.url + "/v1/completions", json=PROMPT | {"stream": stream})
            )
            await here.decode.wait_for(lambda: bool(here.decode.legs and here.prefill.legs))
            if stream:
                response = await request
                await response.content.readany()
                # Else the garbage collector would do it, in the middle of some later test.
                response.close()
            request.cancel()
        for worker in here.workers:
            (leg,) = worker.legs
            await wait_aborted(worker, leg)
            await asyncio.wait_for(leg.gone.wait(), DEADLINE_SECONDS)
            assert Reason.CLIENT_GONE is worker.aborts[0].reason
        assert 0 == here.router.in_flight_count


async def test_one_sequence_that_fails_ends_the_others_of_its_request(tmp_path: Path) -> None:
    async def by_seed(leg: Leg, request: web.Request) -> web.StreamResponse:
        if leg.body["seed"] == 1:
            return await refuse(500, "ModelFailed")(leg, request)
        return await never(leg, request)

    async with world(tmp_path) as here:
        here.decode.behaviour = by_seed

        status, body = await complete(here, n=3, seed=0)

        assert (500, "ModelFailed") == (status, body["error"]["code"])
        others = [leg for leg in here.decode.legs if leg.body["seed"] != 1]
        for leg in others:
            await asyncio.wait_for(leg.gone.wait(), DEADLINE_SECONDS)
            await wait_aborted(here.decode, leg)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (hang_up, "EngineDied"),
        (None, "PeerFailed"),
        ("error", "TransferFailed"),
    ],
)
async def test_a_stream_that_breaks_ends_with_one_error_and_no_done(
    tmp_path: Path, end: Behaviour | str | None, code: str
) -> None:
    async def half(leg: Leg, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        for event in events_of(leg, count=2):
            await response.write(event)
        if end == "error":
            error = {"error": {"message": "late", "type": "x", "code": code, "param": None}}
            # Together with half an event, as a buffer may hold them.
            await response.write(b"data: %b\n\n" % json.dumps(error).encode())
        elif end is hang_up:
            await response.write(b'data: {"choices": [{"te')
            return await hang_up(leg, request)
        await response.write_eof()
        return response

    async with world(tmp_path) as here:
        here.decode.behaviour = half
        text = await streamed(here)

        payloads = [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n") if each]
        assert ["t0", "t1"] == [payload["choices"][0]["text"] for payload in payloads[:-1]]
        error = payloads[-1]["error"]
        assert (code, "decode") == (error["code"], error["leg"])
        assert "[DONE]" not in text


async def test_prefills_failure_after_the_first_event_changes_nothing(tmp_path: Path) -> None:
    streaming = asyncio.Event()

    async def late_failure(leg: Leg, request: web.Request) -> web.StreamResponse:
        await streaming.wait()
        return await refuse(500, "ModelFailed")(leg, request)

    async def slow(leg: Leg, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        first, *rest = events_of(leg)
        await response.write(first)
        streaming.set()
        for event in rest:
            await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async with world(tmp_path) as here:
        here.prefill.behaviour, here.decode.behaviour = late_failure, slow

        assert (await streamed(here)).endswith("data: [DONE]\n\n")


async def test_the_first_event_does_not_wait_for_prefills_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.prefill.behaviour = never

        assert (await streamed(here)).endswith("data: [DONE]\n\n")


async def test_a_client_that_does_not_read_holds_decode_back_and_is_dropped(
    tmp_path: Path,
) -> None:
    written = 0

    async def flood(leg: Leg, request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = await begin_stream(request)
        event = b'data: {"choices": [{"text": "%b"}]}\n\n' % (b"x" * 60_000)
        while True:
            await response.write(event)
            written += len(event)

    timeouts = Timeouts(queue_seconds=5, bootstrap_seconds=5, stall_seconds=1)
    async with world(tmp_path, timeouts=timeouts) as here:
        here.decode.behaviour = flood
        host, port = "127.0.0.1", here.router.port
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        body = json.dumps(PROMPT | {"stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await here.decode.wait_for(lambda: bool(here.decode.legs))

        await asyncio.wait_for(here.decode.legs[0].gone.wait(), DEADLINE_SECONDS)

        await here.decode.wait_for(lambda: bool(here.decode.aborts))
        assert Reason.CLIENT_GONE is here.decode.aborts[0].reason
        # Socket buffers of both connections hold some; the router itself holds little.
        assert written < 32 << 20
        writer.close()
        del reader


def once(first: Behaviour, then: Behaviour) -> Behaviour:
    """Behave in one way for one leg, and then in another."""
    behaviours = iter([first])

    async def behave(leg: Leg, request: web.Request) -> web.StreamResponse:
        return await next(behaviours, then)(leg, request)

    return behave
