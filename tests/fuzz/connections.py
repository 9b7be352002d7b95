"""Connections as bytes: clients of a router, its legs to engines, and a sidecar's `/route` path."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from fuzz.files import SIDECAR
from fuzz.http import HERE, QUERY, RING, ROW
from fuzz.mutation import Parts
from fuzz.target import Target, one_part
from pdcluster_protocol.authentication import HEADER, HttpSigner, HttpVerifier
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.push.registry import RegistryNode
from pdcluster_sidecar.route_path import RoutePath
from pdcluster_sidecar.router.exchange import Exchange
from pdcluster_sidecar.router.legs import Leg, LegConnection, LegPool
from pdcluster_sidecar.router.listening import ServeLimits, Server
from pdcluster_sidecar.router.serve import ClientConnection


class _Wire(asyncio.Transport):
    """A transport that keeps what is written and says whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False
        self.protocol: asyncio.BaseProtocol | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (HOST, int(PORT)) if name == "sockname" else default

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


STATUS = re.compile(rb"HTTP/1\.1 (\d+) ")
LIMITS = ServeLimits(body_bytes_max=4096, buffered_bytes_max=8192, connections_max=4)
LOOP = asyncio.new_event_loop()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: h:1\r\ncontent-type: application/json\r\n"
    b'content-length: 13\r\n\r\n{"prompt": 1}'
)
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
    b"Expect: 100-continue\r\n\r\n5\r\nhello\r\n3;x=y\r\n, w\r\n0\r\nTrailer: 1\r\n\r\n"
)
GET = b"GET http://h/health?x=1 HTTP/1.0\r\nConnection: keep-alive\r\nX-A:\r\n\r\n"


def check_connections(parts: Parts) -> bool:
    """Bytes of a client end in requests, or in a refusal and a close; nothing stays counted."""
    return LOOP.run_until_complete(_converse(parts))


async def _converse(parts: Parts) -> bool:
    taken: list[Exchange] = []

    def handle(exchange: Exchange) -> None:
        taken.append(exchange)
        exchange.answer(200, b"{}")

    server = Server(handle, LIMITS, now=lambda: 1.0)
    connection, wire = ClientConnection(server), _Wire()
    connection.connection_made(wire)
    for part in parts:
        if not wire.closed:
            connection.data_received(part)
        # A request behind another is served in the loop's next turn.
        await asyncio.sleep(0)
    connection.connection_lost(None)
    assert 0 == server.connection_count
    assert 0 == server._buffered
    answers = STATUS.findall(bytes(wire.written))
    assert len(answers) >= len(taken)
    faults = {answer for answer in answers if answer.startswith(b"5")} - {b"501", b"505"}
    assert set() == faults
    return bool(taken)


class _Library(asyncio.Protocol):
    """What a connection is handed to; it keeps the bytes."""

    def __init__(self) -> None:
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data


CONFIGS = (SIDECAR, msgspec.structs.replace(SIDECAR, interop="Allow"))
HOST, _, PORT = HERE.rpartition(":")


def check_routes(parts: Parts) -> bool:
    """Bytes are answered or handed over whole, none twice; and nothing is kept of who left."""
    taken = [LOOP.run_until_complete(_registered(parts, config)) for config in CONFIGS]
    return any(taken)


async def _registered(parts: Parts, config: SidecarConfig) -> bool:
    library = _Library()
    path = RoutePath(config, RegistryNode(), HttpVerifier(RING), library=lambda: library)
    connection, wire = path(), _Wire()
    connection.connection_made(wire)
    for part in parts:
        (library if wire.protocol is library else connection).data_received(part)
    stream = b"".join(parts)
    assert stream.endswith(library.received)
    answers = STATUS.findall(bytes(wire.written))
    assert set(answers) <= {b"200", b"400", b"404", b"503"}
    assert len(answers) <= stream.count(b"HTTP/1.1")
    connection.connection_lost(None)
    assert not path.open
    path.close()
    return bool(answers)


def _routed(method: str, target: str, body: bytes = b"") -> bytes:
    signature = HttpSigner(RING, f"s{len(body)}").sign(method, target, body, authority=HERE)
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: {HERE}\r\nContent-Length: {len(body)}\r\n"
        f"{HEADER}: {signature}\r\n\r\n"
    )
    return head.encode() + body


class _Heard:
    """A leg's listener that keeps in which order it was told."""

    def __init__(self) -> None:
        self.told = ""
        """One letter a call: head, part, fed, end, lost. Raising here would end in the parser."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.told += "h" if 200 <= status else "?"

    def on_part(self, part: bytes) -> None:
        self.told += "p"

    def on_fed(self) -> None:
        self.told += "f"

    def on_end(self) -> None:
        self.told += "e"

    def on_lost(self, reason: Reason, detail: str) -> None:
        self.told += "l"


ORDER = re.compile(r"f*(h[pf]*e|(h[pf]*)?l)")
ENGINE = RankAddress("127.64.0.3", 30000)
WHOLE = b'HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-pd-load: {"a": 1}\r\n\r\n{}'
EVENTS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n",
    b"b\r\ndata: {}\n\n\r\n",
    b"0\r\n\r\n",
)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def check_legs(parts: Parts) -> bool:
    """Whatever an engine answers, a leg's listener hears one head and one end, in this order."""
    return LOOP.run_until_complete(_answered(parts))


async def _answered(parts: Parts) -> bool:
    pool = LegPool(HttpSigner(RING, "router"), now=lambda: 1.0)
    connection, wire, heard = LegConnection(pool, ENGINE), _Wire(), _Heard()
    connection.connection_made(wire)
    connection.send(b"POST / HTTP/1.1\r\n\r\n", b"", Leg(heard))
    for part in parts:
        if not wire.closed:
            connection.data_received(part)
    kept = pool.idle_count
    connection.connection_lost(None)
    assert ORDER.fullmatch(heard.told), heard.told
    assert 0 == pool.idle_count
    return bool(kept)


PUT = _routed("PUT", "/route", msgspec.json.encode(ROW))
ASK = _routed("GET", f"/route?{QUERY.decode()}")

TARGETS = (
    Target(
        "client connections",
        (*one_part(REQUEST, CHUNKED, GET), (REQUEST + GET, CHUNKED + REQUEST), (REQUEST * 12,)),
        check_connections,
    ),
    Target(
        "leg connections",
        (*one_part(WHOLE, WHOLE + WHOLE, INTERIM + WHOLE), EVENTS, (WHOLE[:30], WHOLE[30:])),
        check_legs,
    ),
    Target(
        "route connections",
        (*one_part(PUT, ASK, GET), (PUT, ASK), (PUT[:90], PUT[90:]), (PUT + ASK,)),
        check_routes,
    ),
)
