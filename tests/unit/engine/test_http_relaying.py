"""A sequence that came to the wrong DP rank is computed by the right one, answered by the other."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from pdcluster_engine.http.dp_ranks import dp_rank_of
from pdcluster_engine.http.relaying import SEQUENCE_PATH
from pdcluster_engine.submission import Submission
from pdcluster_protocol.authentication import HEADER, HttpSigner
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import Reason, RequestFailed
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.requests import LegFields
from pdcluster_protocol.topology import Parallelism
from support.scripted_engine import CONFIG, RING, ScriptedEngine, Step, serving, spell

TWO = msgspec.structs.replace(
    CONFIG, role=Role.PREFILL, interop="Allow", parallel=Parallelism(tp=2, dp=2)
)
SESSIONS = itertools.count()
NOWHERE = RankAddress("127.0.0.1", 1)


def leg(room: int | list[int], **fields: Any) -> dict[str, Any]:
    return {
        "bootstrap_host": "127.64.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": room,
        **fields,
    }


def one(room: int, **fields: Any) -> dict[str, Any]:
    return leg(room, text="x", sampling_params={"max_new_tokens": 3}, **fields)


def saying(text: str) -> ScriptedEngine:
    return ScriptedEngine(lambda submission: spell(text, submission))


def hanging() -> ScriptedEngine:
    """Says two tokens, and then nothing until it is cancelled."""

    def script(submission: Submission) -> list[Step]:
        return [*spell("ab", submission), threading.Event()]

    return ScriptedEngine(script)


@asynccontextmanager
async def instance(
    zero: ScriptedEngine, other: ScriptedEngine, *, role: Role = Role.PREFILL
) -> AsyncIterator[str]:
    """Two ranks; yields the address of rank 0, which alone is known to clients."""
    two = msgspec.structs.replace(TWO, role=role)
    async with serving(other, config=msgspec.structs.replace(two, dp_rank=1)) as address:
        port = int(address.rpartition(":")[2])
        ranks = (NOWHERE, RankAddress("127.0.0.1", port))
        config = msgspec.structs.replace(two, rank_addresses=ranks)
        async with serving(zero, config=config) as asked:
            yield asked


async def generate(address: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(address) as client,
        client.post("/generate", json=body) as answer,
    ):
        text = await answer.text()
        return answer.status, text if text.startswith("data:") else json.loads(text)


@pytest.mark.parametrize("role", Role)
async def test_a_leg_of_the_other_rank_is_computed_there(role: Role) -> None:
    zero, other = saying("zero"), saying("one")
    async with instance(zero, other, role=role) as asked:
        status, answer = await generate(asked, one(7))
        assert (200, "one") == (status, answer["text"])
        status, answer = await generate(asked, one(8))
        assert (200, "zer") == (status, answer["text"])
    assert [8] == [submission.key.room for submission in zero.submissions]
    assert [7] == [submission.key.room for submission in other.submissions]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_relayed_answer_is_that_of_the_rank_itself(*, stream: bool) -> None:
    body = one(7, stream=stream, rid="r", return_logprob=True, top_logprobs_num=2)
    config = msgspec.structs.replace(TWO, role=Role.DECODE, dp_rank=1)
    async with instance(saying("zero"), saying("one"), role=Role.DECODE) as asked:
        _, relayed = await generate(asked, body)
    async with serving(saying("one"), config=config) as itself:
        _, direct = await generate(itself, body)
    assert _steady(direct) == _steady(relayed)


def _steady(answer: Any) -> Any:
    """The whole answer without what time decides; a stream's events repeat all so far."""
    if isinstance(answer, str):
        *_, last, done = answer.removeprefix("data: ").strip().split("\n\ndata: ")
        assert "[DONE]" == done
        answer = json.loads(last)
    answer["meta_info"].pop("e2e_latency", None)
    return answer


async def test_a_batch_is_spread_over_the_ranks_of_its_rooms_and_answered_in_order() -> None:
    rooms = [10, 11, 13, 12, 15]
    zero, other = saying("zero"), saying("one")
    body = leg(rooms, text=["a", "b", "c", "d", "e"], sampling_params={"max_new_tokens": 3})
    async with instance(zero, other) as asked:
        status, answers = await generate(asked, body)
    assert 200 == status
    assert ["zer", "one", "one", "zer", "one"] == [answer["text"] for answer in answers]
    assert [11, 13, 15] == sorted(submission.key.room for submission in other.submissions)


async def test_a_client_that_leaves_ends_the_sequence_at_its_rank() -> None:
    other = hanging()
    async with instance(saying("zero"), other) as asked, aiohttp.ClientSession(asked) as client:
        asking = asyncio.create_task(client.post("/generate", json=one(7)))
        await asyncio.to_thread(other.wait_for_submissions, 1)
        asking.cancel()
        assert [Reason.CLIENT_GONE] == await asyncio.to_thread(other.wait_for_cancels, 1)


async def test_a_rid_is_aborted_where_it_is_computed() -> None:
    other = hanging()
    async with instance(saying("zero"), other) as asked:
        asking = asyncio.create_task(generate(asked, one(7, rid="mine")))
        await asyncio.to_thread(other.wait_for_submissions, 1)
        async with (
            aiohttp.ClientSession(asked) as client,
            client.post("/abort_request", json={"rid": "mine"}) as answer,
        ):
            assert 200 == answer.status
        status, answer_body = await asking
        await asyncio.to_thread(other.wait_for_cancels, 1)
    assert (500, "Aborted") == (status, answer_body["error"]["code"])


async def test_a_refusal_of_the_right_rank_is_passed_on() -> None:
    other = saying("one")
    other.refusal = RequestFailed("room 7 has a live request here", reason=Reason.ROOM_IN_USE)
    async with instance(saying("zero"), other) as asked:
        status, answer = await generate(asked, one(7))
        assert (503, "RoomInUse") == (status, answer["error"]["code"])
        other.refusal, other.joined = None, False
        status, answer = await generate(asked, one(9))
    assert (503, "NotReady") == (status, answer["error"]["code"])
    assert "DP rank 1" in answer["error"]["message"]


async def test_a_room_that_is_relayed_already_is_in_use() -> None:
    other = hanging()
    async with instance(saying("zero"), other) as asked:
        asking = asyncio.create_task(generate(asked, one(7)))
        await asyncio.to_thread(other.wait_for_submissions, 1)
        assert 503 == (await generate(asked, one(7)))[0]
        asking.cancel()
        await asyncio.to_thread(other.wait_for_cancels, 1)
    assert 1 == len(other.submissions)


async def test_a_rank_that_is_not_there_is_named() -> None:
    config = msgspec.structs.replace(TWO, rank_addresses=(NOWHERE, NOWHERE))
    async with serving(saying("zero"), config=config) as asked:
        status, answer = await generate(asked, one(7))
    assert (502, "PeerUnreachable") == (status, answer["error"]["code"])
    assert "DP rank 1 at 127.0.0.1:1 is not reachable" in answer["error"]["message"]


async def test_a_rank_that_ends_in_the_middle_ends_the_request_by_name() -> None:
    async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(breaks_off, "127.0.0.1", 0)
    async with server:
        there = RankAddress("127.0.0.1", server.sockets[0].getsockname()[1])
        config = msgspec.structs.replace(TWO, rank_addresses=(NOWHERE, there))
        async with serving(saying("zero"), config=config) as asked:
            status, answer = await generate(asked, one(7))
    assert (502, "EngineDied") == (status, answer["error"]["code"])
    assert f"DP rank 1 at {there}" in answer["error"]["message"]


async def test_what_was_relayed_is_not_relayed_again() -> None:
    """Rank 0 takes itself for rank 1, as a wrong configuration would make it."""
    zero = saying("zero")
    async with serving(zero, config=TWO) as itself:
        there = RankAddress("127.0.0.1", int(itself.rpartition(":")[2]))
        config = msgspec.structs.replace(TWO, rank_addresses=(NOWHERE, there))
        async with serving(saying("zero"), config=config) as asked:
            status, answer = await generate(asked, one(7))
    assert (409, "RankConflict") == (status, answer["error"]["code"])
    assert [] == zero.submissions


async def test_sequences_are_taken_from_our_own_ranks_only_whatever_interop_says() -> None:
    engine = saying("zero")
    async with serving(engine, config=TWO) as address, aiohttp.ClientSession(address) as client:
        async with client.post(SEQUENCE_PATH, data=b"x") as answer:
            assert 401 == answer.status
        signer = HttpSigner(RING, f"session-{next(SESSIONS)}")
        headers = {
            HEADER: signer.sign(
                "POST", SEQUENCE_PATH, b"x", authority=address.removeprefix("http://")
            )
        }
        async with client.post(SEQUENCE_PATH, data=b"x", headers=headers) as answer:
            assert 400 == answer.status
    assert [] == engine.submissions


@pytest.mark.parametrize(
    ("role", "room", "fields", "rank"),
    [
        (Role.PREFILL, 7, {}, 1),
        (Role.PREFILL, 7, {"prefill_dp_rank": 0}, 0),
        (Role.PREFILL, 7, {"routed_dp_rank": 0}, 1),
        (Role.DECODE, 7, {}, 1),
        (Role.DECODE, 7, {"routed_dp_rank": 0}, 0),
        (Role.DECODE, 7, {"prefill_dp_rank": 0}, 1),
        (Role.PREFILL, None, {"routed_dp_rank": 1}, 1),
        (Role.PREFILL, None, {"prefill_dp_rank": 1}, 0),
        (Role.DECODE, None, {}, 0),
    ],
)
def test_the_rank_of_a_sequence_follows_the_table(
    role: Role, room: int | None, fields: dict[str, int], rank: int
) -> None:
    config: EngineConfig = msgspec.structs.replace(TWO, role=role)
    fits = LegFields(hosts=(None,), ports=(None,), rooms=(room,), **fields)
    assert rank == dp_rank_of(fits, room, config)
