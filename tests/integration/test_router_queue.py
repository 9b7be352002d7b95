"""The queue and the members: who waits, who is refused, who may be chosen."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from pdcluster_protocol.authentication import HEADER
from pdcluster_protocol.ids import Role
from pdcluster_protocol.limits import Timeouts
from support.canned import CannedWorker, Leg, World, answer, never, pair_of_workers, refuse, world

QUICK = Timeouts(queue_seconds=0.3, bootstrap_seconds=5, stall_seconds=5)


async def complete(here: World, **fields: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(here.url + "/v1/completions", json={"prompt": "hello"} | fields) as response,
    ):
        return response.status, dict(response.headers), json.loads(await response.read())


async def signed(here: World, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    headers = {
        HEADER: here.signer.sign(method, path, body, authority=urlsplit(here.admin_url).netloc)
    }
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, here.admin_url + path, data=body, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


async def test_who_is_over_the_bounds_is_told_to_come_again(tmp_path: Path) -> None:
    async with world(tmp_path, max_in_flight=1, max_queued=1) as here:
        here.decode.behaviour = never
        running = asyncio.create_task(complete(here))
        await here.decode.wait_for(lambda: len(here.decode.legs) == 1)
        waiting = asyncio.create_task(complete(here))
        async with asyncio.timeout(10):
            while here.router.queued_count == 0:
                await asyncio.wait([waiting], timeout=0.01)

        status, headers, body = await complete(here)

        assert (429, "Overloaded") == (status, body["error"]["code"])
        assert "1" == headers["Retry-After"]
        status, _, body = await complete(here, n=2)
        assert 429 == status
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


async def test_who_waits_runs_when_a_place_is_free(tmp_path: Path) -> None:
    async with world(tmp_path, max_in_flight=2, max_queued=100) as here:
        answers = await asyncio.gather(*(complete(here) for _ in range(20)))

        assert {200} == {status for status, _, _ in answers}
        assert (0, 0) == (here.router.in_flight_count, here.router.queued_count)


async def test_a_place_that_never_comes_ends_as_queue_timeout(tmp_path: Path) -> None:
    async with world(tmp_path, max_in_flight=1, timeouts=QUICK) as here:
        here.decode.behaviour = never
        running = asyncio.create_task(complete(here))
        await here.decode.wait_for(lambda: len(here.decode.legs) == 1)

        status, _, body = await complete(here)

        assert (504, "QueueTimeout") == (status, body["error"]["code"])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_pair_that_never_comes_ends_as_no_pair(tmp_path: Path) -> None:
    workers = pair_of_workers()
    workers[1].ready = False
    async with world(tmp_path, workers=workers, wait=False, timeouts=QUICK) as here:
        for prompt in ("hello", [1, 2]):
            status, headers, body = await complete(here, prompt=prompt)

            assert (503, "NoPair") == (status, body["error"]["code"])
            assert "1" == headers["Retry-After"]


async def test_where_all_members_of_a_role_drain_the_answer_names_them(tmp_path: Path) -> None:
    async with world(tmp_path, timeouts=QUICK) as here:
        here.decode.draining = True
        await wait_unusable(here, here.decode)
        status, headers, body = await complete(here)

        assert (503, "NoPair") == (status, body["error"]["code"])
        assert body["error"]["message"].endswith("0.3 s; c-decode-0: it is draining")
        assert "1" == headers["Retry-After"]
        assert [] == here.decode.legs
        async with aiohttp.ClientSession() as session, session.get(f"{here.url}/ready") as ready:
            assert (503, True) == (ready.status, "it is draining" in await ready.text())


async def test_what_runs_at_a_member_that_drains_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        finish = asyncio.Event()

        async def late(leg: Leg, request: web.Request) -> web.StreamResponse:
            await finish.wait()
            return await answer(leg, request)

        here.decode.behaviour = late
        running = asyncio.create_task(complete(here))
        await here.decode.wait_for(lambda: len(here.decode.legs) == 1)
        here.prefill.draining = here.decode.draining = True
        await wait_unusable(here, here.decode)
        finish.set()

        assert 200 == (await running)[0]
        assert [] == here.decode.aborts


async def wait_unusable(here: World, worker: CannedWorker) -> None:
    async with asyncio.timeout(10):
        while True:
            _, views = await signed(here, "GET", "/pd/v1/members")
            [view] = [v for v in views["members"] if v["instance"] == worker.instance]
            if not view["usable"]:
                return


async def test_a_request_waits_for_the_first_pair(tmp_path: Path) -> None:
    workers = pair_of_workers()
    workers[0].ready = False
    async with world(tmp_path, workers=workers, wait=False) as here:
        request = asyncio.create_task(complete(here))
        await asyncio.wait([request], timeout=0.1)
        assert not request.done()

        here.prefill.ready = True
        assert 200 == (await request)[0]


async def test_pairs_form_only_inside_one_fingerprint(tmp_path: Path) -> None:
    workers = [
        CannedWorker(Role.PREFILL, number=0, fingerprint="old"),
        CannedWorker(Role.DECODE, number=0, fingerprint="old"),
        CannedWorker(Role.PREFILL, number=1, fingerprint="new"),
        CannedWorker(Role.DECODE, number=1, fingerprint="new"),
    ]
    async with world(tmp_path, workers=workers) as here:
        async with asyncio.timeout(10):
            while not all(worker.legs for worker in workers):
                assert 200 == (await complete(here))[0]

        fingerprints: dict[int, set[str]] = {}
        for worker in workers:
            for leg in worker.legs:
                fingerprints.setdefault(leg.body["pd_attempt"], set()).add(worker.fingerprint)
        assert {1} == {len(found) for found in fingerprints.values()}


async def test_an_orphan_is_not_paired_across_fingerprints(tmp_path: Path) -> None:
    workers = [
        CannedWorker(Role.PREFILL, fingerprint="old"),
        CannedWorker(Role.DECODE, fingerprint="new"),
    ]
    async with world(tmp_path, workers=workers, wait=False, timeouts=QUICK) as here:
        assert 503 == (await complete(here))[0]


async def test_the_less_loaded_of_two_is_chosen(tmp_path: Path) -> None:
    workers = [CannedWorker(Role.PREFILL)]
    workers += [CannedWorker(Role.DECODE, number=number) for number in range(2)]
    async with world(tmp_path, workers=workers) as here:
        await _usable(here, 3)
        for worker in workers:
            worker.behaviour = never
        requests = [asyncio.create_task(complete(here)) for _ in range(8)]
        await asyncio.gather(*(_got_legs(worker, 4) for worker in workers[1:]))

        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def test_a_refusing_member_is_left_alone_until_it_reports_again(tmp_path: Path) -> None:
    workers = [*pair_of_workers(), CannedWorker(Role.DECODE, number=1)]
    async with world(tmp_path, workers=workers) as here:
        await _usable(here, 3)
        workers[1].behaviour = refuse(503, "NotReady")

        answers = [await complete(here) for _ in range(5)]

        assert {200} == {status for status, _, _ in answers}


async def test_client_errors_blame_no_member(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.prefill.behaviour = refuse(400, "TooLarge")
        for _ in range(10):
            assert 400 == (await complete(here))[0]

        here.prefill.behaviour = answer
        status, members = await signed(here, "GET", "/pd/v1/members")
        assert (200, {True}) == (status, {each["usable"] for each in members["members"]})
        assert 200 == (await complete(here))[0]


async def test_a_member_that_is_another_than_configured_is_not_used(tmp_path: Path) -> None:
    workers = pair_of_workers()
    workers[0].instance = "stranger"
    await workers[0].start()
    member = workers[0].member
    workers[0].instance = "somebody-else"
    await workers[1].start()
    members = (member, workers[1].member)
    async with world(
        tmp_path, workers=workers, wait=False, timeouts=QUICK, members=members
    ) as here:
        assert 503 == (await complete(here))[0]
        _, listed = await signed(here, "GET", "/pd/v1/members")
        problem = listed["members"][0]["problem"]
        assert "somebody-else" in problem
        assert "stranger" in problem


async def test_the_admin_port_wants_a_signature(tmp_path: Path) -> None:
    async with world(tmp_path) as here, aiohttp.ClientSession() as session:
        for path in ("/pd/v1/members", "/pd/v1/canary", "/nothing"):
            async with session.get(here.admin_url + path) as response:
                assert 401 == response.status
                assert "Unauthorized" == (await response.json())["error"]["code"]
        async with session.post(
            here.admin_url + "/pd/v1/canary",
            data=b"{}",
            headers={"Content-Encoding": "gzip"},
            compress=False,
        ) as response:
            assert 400 == response.status
            assert "InvalidRequest" == (await response.json())["error"]["code"]
        async with session.get(here.admin_url + "/health") as response:
            assert 200 == response.status
        assert 404 == (await signed(here, "GET", "/nothing"))[0]
        assert 405 == (await signed(here, "GET", "/pd/v1/canary"))[0]


async def test_metrics_count_requests_by_outcome_and_reason(tmp_path: Path) -> None:
    async with world(tmp_path) as here, aiohttp.ClientSession() as session:
        await complete(here)
        await complete(here, max_tokens=0)
        async with session.get(here.admin_url + "/metrics") as response:
            text = await response.text()

        name = "pdcluster_requests_total"
        assert f'{name}{{outcome="answered",reason="",role="router"}} 1.0' in text
        assert f'{name}{{outcome="refused",reason="InvalidRequest",role="router"}} 1.0' in text
        assert 'pdcluster_phase_seconds_count{phase="first_byte",role="router"} 1.0' in text
        assert "pdcluster_in_flight 0.0" in text


async def test_a_canary_goes_through_the_named_pair(tmp_path: Path) -> None:
    workers = [CannedWorker(role, number=number) for number in range(2) for role in Role]
    async with world(tmp_path, workers=workers) as here:
        await _usable(here, 4)
        for number in range(2):
            names = {"prefill": f"c-prefill-{number}", "decode": f"c-decode-{number}"}
            body = json.dumps(names).encode()
            status, canary = await signed(here, "POST", "/pd/v1/canary", body)

            assert (200, True) == (status, canary["ok"])
            assert names == {name: canary[name] for name in names}
            assert "8/0" == canary["answer"]["choices"][0]["text"]
        assert [1, 1, 1, 1] == [len(worker.legs) for worker in workers]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "InvalidRequest"),
        (b'{"prefill":"c-prefill-0"}', 400, "InvalidRequest"),
        (b'{"prefill":"c-prefill-0","decode":"c-decode-9"}', 503, "NotReady"),
        (b'{"prefill":"c-decode-0","decode":"c-prefill-0"}', 503, "NotReady"),
    ],
)
async def test_a_canary_for_no_pair_is_refused(
    tmp_path: Path, body: bytes, status: int, code: str
) -> None:
    async with world(tmp_path) as here:
        found, answered = await signed(here, "POST", "/pd/v1/canary", body)

        assert (status, code) == (found, answered["error"]["code"])


async def test_a_failing_canary_names_leg_and_reason(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.decode.behaviour = refuse(503, "RoomInUse")
        body = b'{"prefill":"c-prefill-0","decode":"c-decode-0"}'
        _, canary = await signed(here, "POST", "/pd/v1/canary", body)

        assert (False, "RoomInUse", "decode") == (canary["ok"], canary["reason"], canary["leg"])


async def _usable(here: World, count: int) -> None:
    """Wait until so many members may be chosen."""
    async with asyncio.timeout(10):
        while True:
            _, listed = await signed(here, "GET", "/pd/v1/members")
            if count == sum(each["usable"] for each in listed["members"]):
                return


async def _got_legs(worker: CannedWorker, count: int) -> None:
    await worker.wait_for(lambda: len(worker.legs) == count)
