"""A plain SGLang peer: heard only where interop allows it, and in its own frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
import zmq
from aiohttp import web

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress, Role
from pdcluster_protocol.messages import (
    Inbound,
    Outbound,
    Resolve,
    Resolved,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.push.registry import Answer, RegistryNode
from support.plain_ranks import plain_body
from support.ports import fresh_host
from support.sidecars import FakeEngine, SidecarProcess, running

KEY = Key(77, 0)


class PlainPrefill:
    """A registry and a PULL socket, as a plain prefill server has them."""

    def __init__(self) -> None:
        self.host = fresh_host()
        self.http = RankAddress(self.host, 8998)
        self.control = RankAddress(self.host, 9000)
        self.registry = RegistryNode()
        body = plain_body(rank_ip=self.host, prefill_http_port=30000)
        assert 200 == self.registry.put_route(body).status
        app = web.Application()
        app.router.add_get("/route", self._route)
        self._runner = web.AppRunner(app)
        self._context = zmq.Context()
        self.pull = self._context.socket(zmq.PULL)

    async def start(self) -> None:
        self.pull.set(zmq.RCVTIMEO, 10_000)
        self.pull.bind(f"tcp://{self.control}")
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 8998).start()

    async def close(self) -> None:
        self._context.destroy(linger=0)
        await self._runner.cleanup()

    def push(self, to: RankAddress, parts: list[bytes]) -> None:
        sock = self._context.socket(zmq.PUSH)
        sock.connect(f"tcp://{to}")
        sock.send_multipart(parts)
        sock.close(linger=5000)

    async def _route(self, request: web.Request) -> web.Response:
        answer: Answer = self.registry.get_route(request.query)
        return web.Response(status=answer.status, text=answer.text)


@pytest_asyncio.fixture
async def plain() -> AsyncIterator[PlainPrefill]:
    peer = PlainPrefill()
    await peer.start()
    yield peer
    await peer.close()


async def decode_of(tmp_path: Path, **changes: Any) -> tuple[SidecarProcess, FakeEngine]:
    sidecar = SidecarProcess(tmp_path, Role.DECODE, **changes)
    return sidecar, FakeEngine(sidecar.config)


async def test_a_plain_prefill_is_resolved_and_spoken_to_in_its_own_frames(
    plain: PlainPrefill, tmp_path: Path
) -> None:
    sidecar, engine = await decode_of(tmp_path, interop="Allow")
    async with running(sidecar):
        await engine.open()
        engine.send(Resolve(plain.http.host, plain.http.port))
        resolved = await engine.receive(Resolved)

        assert resolved.card is not None
        assert (False, "", 30000) == (
            resolved.trusted,
            resolved.card.incarnation,
            resolved.card.ranks[0].http_port,
        )
        assert plain.control == resolved.card.ranks[0].address
        message = TransferMetadata(KEY, engine.address, "s:1", b"\5\0\0\0", 3)
        engine.send(Outbound(plain.control, message))
        got = await asyncio.to_thread(plain.pull.recv_multipart)
        assert (10, b"77", b"9000") == (len(got), got[0], got[2])
        await asyncio.to_thread(plain.push, engine.address, [b"77", b"4", b"0"])
        assert Inbound(Status(KEY, 4, 0), "") == await engine.receive(Inbound)
        await engine.die()


async def test_where_interop_is_refused_a_plain_peer_is_neither_asked_nor_heard(
    plain: PlainPrefill, tmp_path: Path
) -> None:
    sidecar, engine = await decode_of(tmp_path)
    async with running(sidecar):
        await engine.open()
        engine.send(Resolve(plain.http.host, plain.http.port))
        resolved = await engine.receive(Resolved)

        assert (None, Reason.PEER_FAILED) == (resolved.card, resolved.reason)
        await asyncio.to_thread(plain.push, engine.address, [b"77", b"4", b"0"])
        await sidecar.wait_metric('pdcluster_messages_dropped_total{reason="unsigned"}', 1.0)
        assert not engine.has(Inbound)
        await engine.die()
