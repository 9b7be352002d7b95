"""Hostile neighbours of a real sidecar: counted, dropped, bounded, and the next request works."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest_asyncio
import zmq

from pdcluster_protocol.authentication import FrameSigner, HttpSigner, KeyRing
from pdcluster_protocol.codec import FRAME_BYTES_MAX, engine_to_sidecar, frame
from pdcluster_protocol.ids import Key, RankAddress, Role
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import Abort, Inbound, InstanceCard, RankCard, Status
from pdcluster_protocol.push import frames
from pdcluster_protocol.topology import RankCoordinate
from support.ports import fresh_host
from support.sidecars import (
    LAYOUT,
    RING,
    FakeEngine,
    SidecarProcess,
    hello_of,
    running,
    until,
)

SEED = 20261201
GROWTH_BYTES_MAX = 32 << 20
LOG_BYTES_MAX = 32 << 10
STRANGERS = 90
NESTED = b"\x91" * 4000
HELLO = "/pd/v1/hello"


@pytest_asyncio.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[SidecarProcess]:
    """A prefill sidecar that must neither grow, nor fail, nor fill its log."""
    process = SidecarProcess(tmp_path / "p", Role.PREFILL)
    async with running(process):
        before = resident_bytes(process.pid)
        yield process
        assert resident_bytes(process.pid) - before < GROWTH_BYTES_MAX
        log = process.log.read_text()
        assert "Traceback" not in log
        assert len(log) < LOG_BYTES_MAX


@pytest_asyncio.fixture
async def engine(sidecar: SidecarProcess) -> AsyncIterator[FakeEngine]:
    linked = FakeEngine(sidecar.config)
    await linked.open()
    yield linked
    await linked.die()


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def descriptors(sidecar: SidecarProcess) -> int:
    return len(list(Path(f"/proc/{sidecar.pid}/fd").iterdir()))


class Peer:
    """A decode instance that is known by its hello, and seals what a test wants."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self.address = RankAddress(fresh_host(), 9000)
        self._sidecar = sidecar
        self._session = os.urandom(8).hex()
        self._frames = FrameSigner(RING, self._session)
        self.receiver = ""

    async def greet(self) -> None:
        card = InstanceCard(
            cluster="c",
            instance="c-decode-9",
            role="decode",
            incarnation="i9",
            session=self._session,
            http=RankAddress(self.address.host, 8998),
            ranks=(RankCard(RankCoordinate(), self.address, 30000),),
            layout=LAYOUT,
            fingerprint="f",
        )
        body = msgspec.json.encode(card)
        signer = HttpSigner(RING, self._session)
        header = signer.sign("POST", HELLO, body, authority=str(self._sidecar.http))
        status, raw = await self._sidecar.call("POST", HELLO, body, header=header)
        assert 200 == status
        self.receiver = f"{msgspec.json.decode(raw, type=InstanceCard).session}/9000"

    def sealed(self, room: int, **changes: Any) -> list[bytes]:
        fields: dict[str, Any] = {
            "signer": self._frames,
            "receiver": self.receiver,
            "incarnation": "i9",
        }
        return frames.seal(Abort(Key(room, 0), self.address, room), **(fields | changes))


@contextmanager
def pushing(to: RankAddress) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    sock = context.socket(zmq.PUSH)
    sock.set(zmq.SNDTIMEO, 20_000)
    sock.connect(f"tcp://{to}")
    try:
        yield sock
    finally:
        context.destroy(linger=0)


def malformed(genuine: list[bytes], dice: random.Random) -> list[list[bytes]]:
    """What nobody can understand, signed or not."""
    trailer = msgspec.msgpack.decode(genuine[-2])
    nested = msgspec.msgpack.encode([*trailer, None])[:-1] + NESTED + b"\xc0"
    random_parts = [
        [b"\xff" + dice.randbytes(dice.randrange(60)) for _ in range(1 + dice.randrange(6))]
        for _ in range(150)
    ]
    return [
        [b""],
        [b"", b"", b""],
        [b"\0" * (1 << 20)],
        [b"1"] * (Limits().frames_max + 1),
        [b"PD_PING", NESTED],
        [b"None", *[b"x"] * 19],
        [*genuine[:-2], nested, genuine[-1]],
        [*genuine[:-1], genuine[-1][:-1]],
        *random_parts,
    ]


async def dropped(sidecar: SidecarProcess, reason: str) -> float:
    return await sidecar.metric(f'pdcluster_messages_dropped_total{{reason="{reason}"}}')


async def test_control_messages_that_nobody_should_send_are_counted_by_their_reason(
    sidecar: SidecarProcess, engine: FakeEngine
) -> None:
    dice = random.Random(SEED)
    peer = Peer(sidecar)
    await peer.greet()
    old = peer.sealed(1)
    replayed = peer.sealed(2)
    mac = bytearray(replayed[-1])
    mac[0] ^= 1
    other_key = FrameSigner(KeyRing({"k1": b"o" * 32}), "stranger")
    unauthorized = [
        [*peer.sealed(3)[:-1], bytes(mac)],
        peer.sealed(4, signer=other_key),
        peer.sealed(5, receiver=peer.receiver.replace("9000", "9001")),
        peer.sealed(6, signer=FrameSigner(KeyRing({"k9": b"o" * 32}), "stranger")),
    ]
    nonsense = malformed(replayed, dice)
    strange = peer.sealed(7, signer=FrameSigner(RING, "unknown-session"))
    foreign = frames.seal(
        Abort(Key(8, 0), RankAddress("127.9.9.9", 9000), 1),
        signer=peer._frames,
        receiver=peer.receiver,
        incarnation="i9",
    )
    with pushing(engine.address) as sock:
        for parts in (*nonsense, *unauthorized, replayed, replayed, strange, foreign):
            sock.send_multipart(parts)
        sock.send_multipart(frames.encode(Status(Key(9, 0), 4, 0)))
        for room in range(100, 100 + 1100):
            sock.send_multipart(peer.sealed(room))
        sock.send_multipart(old)
        sock.send_multipart(peer.sealed(2000))
        await engine.receive(Inbound, lambda got: _room(got) == 2000)

    # The second copy and the one that is too far behind the newest.
    assert len(unauthorized) + 2 == await dropped(sidecar, "unauthorized")
    assert len(nonsense) == await dropped(sidecar, "malformed")
    for reason in ("unsigned", "unknown_session", "foreign_address"):
        assert 1 == await dropped(sidecar, reason), reason
    rooms = sorted(_room(got) for got in engine._inbox if isinstance(got, Inbound))
    assert [2, *range(100, 1200)] == rooms


def _room(got: Inbound) -> int:
    assert isinstance(got.message, Abort)
    return got.message.key.room


async def test_a_control_port_outlives_other_protocols_silence_and_messages_without_end(
    sidecar: SidecarProcess, engine: FakeEngine
) -> None:
    peer = Peer(sidecar)
    await peer.greet()
    where = (sidecar.config.host, 9000)
    strangers = [socket.create_connection(where) for _ in range(STRANGERS)]
    for number, stranger in enumerate(strangers):
        stranger.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\xff\0\0")[number % 4])
    strangers[0].shutdown(socket.SHUT_WR)
    with pushing(engine.address) as oversized:
        oversized.send(b"\0" * (Limits().message_bytes_max + 1))
        with pushing(engine.address) as sock:
            sock.send_multipart(peer.sealed(1))
            await engine.receive(Inbound, lambda got: _room(got) == 1)
    for stranger in strangers:
        stranger.close()


def head(method: str, target: str, length: int, *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "host: x", f"content-length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_slow_silent_and_half_open_clients_keep_nobody_waiting(
    sidecar: SidecarProcess, engine: FakeEngine
) -> None:
    before = descriptors(sidecar)
    beginnings = (
        b"",
        head("PUT", "/route", 100)[:-2],
        head("PUT", "/route", 100, "x-pd-auth: 2;k1;s;1;h:1;" + "0" * 64) + b"{",
        head("POST", HELLO, 4 << 20, "x-pd-auth: a") + b" " * (256 << 10),
        b"\x16\x03\x01" + b"\0" * 500,
    )
    strangers = [
        await asyncio.open_connection(sidecar.config.host, sidecar.config.http_port)
        for _ in range(STRANGERS)
    ]
    for number, (_, writer) in enumerate(strangers):
        writer.write(beginnings[number % len(beginnings)])
        if number % 7 == 0:
            writer.write_eof()
    async with asyncio.timeout(10):
        assert 200 == (await sidecar.call("GET", "/health"))[0]
        assert 200 == (await sidecar.call("GET", "/ready"))[0]
        assert 200 == (await sidecar.call("GET", "/pd/v1/load", signed=True))[0]
    for _, writer in strangers:
        writer.transport.abort()

    async def closed() -> bool:
        return descriptors(sidecar) <= before + 2

    await until(closed)


async def test_registrations_in_floods_are_refused_and_the_table_stays_right(
    sidecar: SidecarProcess, engine: FakeEngine
) -> None:
    unauthorized = await sidecar.metric("pdcluster_unauthorized_total")
    elsewhere = HttpSigner(RING, "s").sign("PUT", "/route", b"{}", authority="127.0.0.9:8998")
    forged = f"2;k1;s;1;{sidecar.http};" + "0" * 64
    url = f"http://{sidecar.http}/route"

    async def flood(client: aiohttp.ClientSession, header: str, count: int) -> set[int]:
        statuses = set()
        for _ in range(count):
            async with client.put(url, data=b"{}", headers={"x-pd-auth": header}) as answer:
                statuses.add(answer.status)
        return statuses

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client:
        found = await asyncio.gather(
            *(flood(client, header, 100) for header in ("", "x", forged, elsewhere) * 2)
        )
    assert [{401}] * 8 == found
    assert unauthorized + 800 == await sidecar.metric("pdcluster_unauthorized_total")
    for body in (b"{}", b"[" * 5000, b"\xff" * 100):
        assert 400 == (await sidecar.call("PUT", "/route", body, signed=True))[0]
    for room in range(1, 200):
        body = b'{"bootstrap_room": %d, "dp_rank": 0}' % room
        await sidecar.call("POST", "/register_dp_rank", body, signed=True)
    place = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    status, raw = await sidecar.call("GET", f"/route?{place}", signed=True)
    assert (200, engine.address.port) == (status, msgspec.json.decode(raw)["rank_port"])


async def test_garbage_on_the_link_ends_that_connection_and_no_other(
    sidecar: SidecarProcess, engine: FakeEngine
) -> None:
    dice = random.Random(SEED)
    fields = msgspec.msgpack.decode(engine_to_sidecar.encode(hello_of(sidecar.config)))
    impossible = msgspec.msgpack.encode(fields | {"parallel": {"tp": 3, "dp": 2}})
    outgrown = (FRAME_BYTES_MAX + 1).to_bytes(4, "little")
    garbage = [
        frame(impossible),
        frame(NESTED),
        frame(b""),
        outgrown,
        b"\xff" * 64,
        *(frame(dice.randbytes(20)) for _ in range(40)),
    ]
    silent = [await asyncio.open_unix_connection(sidecar.config.link_path) for _ in range(20)]
    for raw in garbage:
        reader, writer = await asyncio.open_unix_connection(sidecar.config.link_path)
        writer.write(raw)
        assert b"" == await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
    for _, writer in silent:
        writer.write(b"\x01")
        writer.transport.abort()

    assert 200 == (await sidecar.call("GET", "/ready"))[0]
    peer = Peer(sidecar)
    await peer.greet()
    with pushing(engine.address) as sock:
        sock.send_multipart(peer.sealed(1))
        await engine.receive(Inbound, lambda got: _room(got) == 1)
