"""`/route` over sockets: its byte path, the library behind it, and a storm of 4,096 ranks."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import structlog

from pdcluster_protocol.authentication import HEADER
from pdcluster_protocol.ids import Role
from pdcluster_sidecar.sidecar import Sidecar
from support.plain_ranks import plain_rank_body
from support.sidecars import DEADLINE_SECONDS, RING, SidecarProcess, running, until

DP, TP = 64, 64
RANKS = DP * TP
CONNECTIONS = 64
SEED = 20261201
ALL = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


def body(rank: int, *, dp: int = DP, tp: int = TP) -> bytes:
    """What a plain SGLang rank says."""
    return plain_rank_body(
        rank,
        dp=dp,
        tp=tp,
    )


def request(method: str, target: str, content: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: registry", *headers]
    if content:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


def put(rank: int, *headers: str, dp: int = DP, tp: int = TP) -> bytes:
    return request("PUT", "/route", body(rank, dp=dp, tp=tp), *headers)


class Connection:
    """One kept-alive connection."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self._address = (sidecar.config.host, sidecar.config.http_port)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            _, _, rest = head.partition(b"content-length: ")
            length = int(rest.split(b"\r\n", 1)[0])
            return int(head.split(b" ", 2)[1]), await self._reader.readexactly(length)

    async def ask(self, raw: bytes) -> tuple[int, bytes]:
        self.send(raw)
        return await self.answer()

    async def ended(self) -> bool:
        """Whether the other end closes and says nothing more."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            return not await self._reader.read(1)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[SidecarProcess]:
    """A sidecar on the test's own loop: most tests need its sockets and no process."""
    place = SidecarProcess(tmp_path, Role.PREFILL, interop="Allow")
    stop = asyncio.Event()
    task = asyncio.create_task(Sidecar(place.config, RING, log=structlog.get_logger()).run(stop))

    async def answers() -> bool:
        try:
            opened = await Connection(place).open()
        except ConnectionError:
            return False
        await opened.close()
        return True

    await until(answers)
    yield place
    stop.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await task


@pytest.fixture
async def connection(served: SidecarProcess) -> AsyncIterator[Connection]:
    opened = await Connection(served).open()
    yield opened
    await opened.close()


async def test_a_storm_counts_each_of_4096_ranks_once_and_is_ready_at_the_last(
    tmp_path: Path,
) -> None:
    sidecar = SidecarProcess(tmp_path, Role.PREFILL, interop="Allow")
    async with running(sidecar):
        await storm(sidecar)


async def storm(sidecar: SidecarProcess) -> None:
    draw = random.Random(SEED)
    *early, last = draw.sample(range(RANKS), RANKS)
    sent = early + draw.sample(early, RANKS // 4)
    draw.shuffle(sent)
    connections = [await Connection(sidecar).open() for _ in range(CONNECTIONS)]

    async def register(connection: Connection, ranks: Sequence[int]) -> None:
        for rank in ranks:
            assert (200, b"OK") == await connection.ask(put(rank))

    async with asyncio.timeout(5.0):
        await asyncio.gather(
            *(register(each, sent[at::CONNECTIONS]) for at, each in enumerate(connections))
        )
    first = connections[0]
    status, text = await first.ask(request("GET", ALL))
    assert (503, True) == (status, f"{RANKS - 1} of {RANKS}".encode() in text)

    assert (200, b"OK") == await first.ask(put(last))
    status, text = await first.ask(request("GET", ALL))
    assert (200, DP) == (status, msgspec.json.decode(text)["dp_size"])
    for rank in draw.sample(range(RANKS), 64):
        place = f"prefill_dp_rank={rank // TP}&prefill_cp_rank=0"
        target = f"/route?{place}&target_tp_rank={rank % TP}&target_pp_rank=0"
        expected = {"rank_ip": "127.0.0.1", "rank_port": 20000 + rank}
        assert expected == msgspec.json.decode((await first.ask(request("GET", target)))[1])
    await asyncio.gather(*(each.close() for each in connections))


async def test_a_new_address_is_told_at_once(connection: Connection) -> None:
    rank = ALL.replace("-1", "0")
    await connection.ask(put(0, dp=1, tp=1))
    before = msgspec.json.decode((await connection.ask(request("GET", rank)))[1])
    moved = body(0, dp=1, tp=1).replace(b"20000", b"20777")
    await connection.ask(request("PUT", "/route", moved))
    after = msgspec.json.decode((await connection.ask(request("GET", rank)))[1])

    assert (20000, 20777) == (before["rank_port"], after["rank_port"])


async def test_a_body_may_come_behind_its_head_and_in_many_pieces(
    served: SidecarProcess,
) -> None:
    beside = await Connection(served).open()
    for pieces in (2, 3, 4, 9):
        connection = await Connection(served).open()
        raw = put(0, dp=1, tp=1)
        size = -(-len(raw) // pieces)
        for start in range(0, len(raw), size):
            connection.send(raw[start : start + size])
            # An answer on another connection: the piece before the next has been read by now.
            await beside.ask(request("GET", "/health"))
        assert (200, b"OK") == await connection.answer()
        await connection.close()
    await beside.close()


async def test_pipelined_requests_are_answered_in_their_order(connection: Connection) -> None:
    connection.send(put(0, dp=1, tp=1) + request("GET", ALL) + request("GET", "/health"))

    assert (200, b"OK") == await connection.answer()
    status, text = await connection.answer()
    assert (200, 1) == (status, msgspec.json.decode(text)["dp_size"])
    assert (200, b"OK") == await connection.answer()


async def test_a_connection_serves_other_paths_and_comes_back(connection: Connection) -> None:
    assert 200 == (await connection.ask(put(0, dp=1, tp=1)))[0]
    assert (200, b"OK") == await connection.ask(request("GET", "/health"))
    assert 200 == (await connection.ask(request("GET", ALL)))[0]
    assert 404 == (await connection.ask(request("GET", "/router")))[0]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (request("GET", ALL, b"", "x-forwarded-for: 10.0.0.1"), 200),
        (request("GET", ALL.replace("=-1", "=%2D1")), 200),
        (
            request("PUT", "/route", gzip.compress(body(0, dp=1, tp=1)), "content-encoding: gzip"),
            200,
        ),
        (request("GET", "/route?prefill_dp_rank=0"), 400),
        (request("GET", ALL.replace("=-1", "=7")), 404),
        (request("PUT", "/route", b"{"), 400),
        (request("PUT", "/route", b'{"attn_tp_size": 0}'), 400),
        (request("DELETE", "/route"), 405),
        (request("POST", "/route", body(0, dp=1, tp=1)), 405),
        (b"PUT /route HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
)
async def test_odd_requests_get_the_same_answers_from_either_side(
    connection: Connection, raw: bytes, expected: int
) -> None:
    await connection.ask(put(0, dp=1, tp=1))

    assert expected == (await connection.ask(raw))[0]


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /route\r\n\r\n",
        b"PUT /route HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
        b"\x00\x01\x02\r\n\r\n",
    ],
)
async def test_what_is_no_request_ends_one_connection_and_no_other(
    served: SidecarProcess, connection: Connection, raw: bytes
) -> None:
    broken = await Connection(served).open()
    assert 400 == (await broken.ask(raw))[0]
    await broken.close()

    assert 200 == (await connection.ask(put(0, dp=1, tp=1)))[0]


async def test_who_asks_to_close_is_closed(connection: Connection) -> None:
    await connection.ask(put(0, dp=1, tp=1))
    assert 200 == (await connection.ask(request("GET", ALL, b"", "connection: close")))[0]

    assert await connection.ended()


async def test_a_signature_is_checked_on_the_byte_path_too(tmp_path: Path) -> None:
    signed = SidecarProcess(tmp_path, Role.PREFILL)
    async with running(signed):
        await check_signatures(signed)


async def check_signatures(signed: SidecarProcess) -> None:
    content, authority = body(0, dp=1, tp=1), str(signed.http)

    def sign(target: str, raw: bytes, *, at: str = authority) -> str:
        method = "PUT" if raw else "GET"
        return f"{HEADER}: {signed.signer.sign(method, target, raw, authority=at)}"

    connection = await Connection(signed).open()
    header = sign("/route", content)
    assert (200, b"OK") == await connection.ask(request("PUT", "/route", content, header))
    assert 200 == (await connection.ask(request("GET", ALL, b"", sign(ALL, b""))))[0]

    for wrong in (
        request("PUT", "/route", content),
        request("PUT", "/route", content, header),
        request("PUT", "/route", content.replace(b"20000", b"20001"), sign("/route", content)),
        request("GET", ALL, b"", sign("/route", b"")),
        request("GET", ALL, b"", sign(ALL, b"", at="127.0.0.1:1")),
    ):
        refused = await Connection(signed).open()
        status, text = await refused.ask(wrong)
        assert (401, True) == (status, b"security.interop: Allow" in text)
        await refused.close()
    assert 5 == await signed.metric("pdcluster_unauthorized_total")
    await connection.close()
