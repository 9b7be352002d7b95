"""Canned workers for the router: sidecars and engines that check signatures and record legs.

A behaviour is an async function that answers one leg; it decides what the engine does. All listen
on loopback addresses of their own, on ports that the kernel chooses.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdcluster_protocol.authentication import (
    HEADER,
    HttpSigner,
    HttpVerifier,
    KeyRing,
    own_authorities,
)
from pdcluster_protocol.config import Member, RouterConfig
from pdcluster_protocol.control_api import AbortRequest, LoadReport
from pdcluster_protocol.errors import Unauthorized
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Timeouts
from pdcluster_protocol.messages import InstanceCard, Load, RankCard
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from pdcluster_sidecar.router.app import Router
from pdcluster_sidecar.router.listening import ServeLimits
from support.ports import fresh_host

RING = KeyRing({"k1": b"0123456789abcdef0123456789abcdef"})
DEADLINE_SECONDS = 20.0
CLUSTER = "c"
MODEL = "tiny"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"


def byte_tokenizer() -> Tokenizer:
    """One token per byte: token ids are the bytes' own letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Leg:
    """One leg as the engine got it."""

    def __init__(self, worker: CannedWorker, path: str, body: dict[str, Any], dp: int) -> None:
        self.worker = worker
        self.path = path
        self.body = body
        self.dp = dp
        self.gone = asyncio.Event()
        """The router closed the leg's connection before it was answered."""

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


Behaviour = Callable[[Leg, web.Request], Awaitable[web.StreamResponse]]


class CannedWorker:
    """One instance: a sidecar and, per DP rank, an engine."""

    def __init__(self, role: Role, *, number: int = 0, dp: int = 1, fingerprint: str = "f") -> None:
        self.role = role
        self.instance = f"{CLUSTER}-{role}-{number}"
        self.host = fresh_host()
        self.dp = dp
        self.fingerprint = fingerprint
        self.incarnation = f"{self.instance}-i1"
        self.ready = True
        self.draining = False
        self.silent = False
        self.load = Load(pages_free=100, pages_total=100, sequences_max=16)
        self.behaviour: Behaviour = answer
        self.legs: list[Leg] = []
        self.aborts: list[AbortRequest] = []
        self.unauthorized: list[str] = []
        self.hellos = 0
        self.changed = asyncio.Condition()
        self.sidecar_port = 0
        self.engine_ports: list[int] = []
        self._verifier = HttpVerifier(RING)
        self._signer = HttpSigner(RING, f"{self.instance}-session")
        self._runners: list[web.AppRunner] = []

    @property
    def member(self) -> Member:
        return Member(
            instance=self.instance,
            role=self.role,
            host=self.host,
            sidecar_port=self.sidecar_port,
            engine_port=self.engine_ports[0],
            dp=self.dp,
        )

    async def start(self) -> None:
        routes = [
            web.post("/pd/v1/hello", self._hello),
            web.get("/pd/v1/load", self._load),
            web.get("/pd/v1/tokenizer", self._tokenizer),
            web.post("/pd/v1/abort", self._abort),
        ]
        self.sidecar_port = await self._serve(routes)
        for dp in range(self.dp):
            self.engine_ports.append(await self._serve([web.post("/{path:.*}", self._engine(dp))]))

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def kill_engines(self) -> None:
        """Close the engines' sockets, as the kernel does for killed processes."""
        for runner in self._runners[1:]:
            await runner.cleanup()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS), self.changed:
            await self.changed.wait_for(condition)

    async def note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _serve(self, routes: list[web.RouteDef]) -> int:
        application = web.Application(client_max_size=64 << 20)
        application.add_routes(routes)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.05)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, self.host, 0).start()
        return int(runner.addresses[0][1])

    async def _verified(self, request: web.Request) -> bytes:
        body = await request.read()
        try:
            self._verifier.verify(
                request.headers.get(HEADER),
                request.method,
                request.raw_path,
                body,
                authorities=own_authorities(self.host, 0, request.get_extra_info("sockname")),
            )
        except Unauthorized as error:
            self.unauthorized.append(error.detail)
            raise web.HTTPUnauthorized(text=error.detail) from error
        return body

    def _card(self) -> InstanceCard:
        ranks = tuple(
            RankCard(RankCoordinate(dp=dp), RankAddress(self.host, 9000 + dp), port)
            for dp, port in enumerate(self.engine_ports)
        )
        return InstanceCard(
            cluster=CLUSTER,
            instance=self.instance,
            role=self.role,
            incarnation=self.incarnation,
            session=self._signer.session,
            http=RankAddress(self.host, self.sidecar_port),
            ranks=ranks,
            parallel=Parallelism(tp=self.dp, dp=self.dp),
            fingerprint=self.fingerprint,
            served_name=MODEL,
            max_context=512,
            ready=self.ready,
        )

    async def _hello(self, request: web.Request) -> web.Response:
        body = await self._verified(request)
        theirs = msgspec.json.decode(body, type=InstanceCard)
        assert ("router", CLUSTER) == (theirs.role, theirs.cluster)
        self.hellos += 1
        answer = msgspec.json.encode(self._card())
        signature = self._signer.sign_answer(request.headers[HEADER], answer)
        return web.Response(body=answer, headers={HEADER: signature})

    async def _load(self, request: web.Request) -> web.Response:
        await self._verified(request)
        if self.silent:
            raise web.HTTPServiceUnavailable
        loads = tuple(self.load for _ in range(self.dp))
        report = LoadReport(self.incarnation, self.ready, self.draining, loads)
        return web.Response(body=msgspec.json.encode(report))

    async def _tokenizer(self, request: web.Request) -> web.Response:
        await self._verified(request)
        files = {
            "tokenizer.json": byte_tokenizer().to_str().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
        }
        encoded = {name: base64.b64encode(raw).decode() for name, raw in files.items()}
        return web.json_response({"digest": "t1", "files": encoded})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self._verified(request)
        self.aborts.append(msgspec.json.decode(body, type=AbortRequest))
        await self.note()
        return web.Response()

    def _engine(self, dp: int) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await self._verified(request)
            leg = Leg(self, request.path, json.loads(body), dp)
            self.legs.append(leg)
            await self.note()
            try:
                return await self.behaviour(leg, request)
            except asyncio.CancelledError:
                leg.gone.set()
                await self.note()
                raise

        return handle


# --- behaviours ---------------------------------------------------------------------------------


def text_of(leg: Leg) -> str:
    """What the canned decode says: its prompt's length, and its seed."""
    return f"{len(leg.body['input_ids'])}/{leg.body['seed']}"


def answer_of(leg: Leg) -> dict[str, Any]:
    """A whole answer in the shape of the leg's API."""
    usage = {"prompt_tokens": len(leg.body["input_ids"]), "completion_tokens": 2}
    usage["total_tokens"] = usage["prompt_tokens"] + 2
    if leg.path == "/generate":
        return {"text": text_of(leg), "meta_info": {"id": leg.body["rid"], **usage}}
    text: dict[str, Any] = {"text": text_of(leg)}
    if leg.path == "/v1/chat/completions":
        text = {"message": {"role": "assistant", "content": text_of(leg)}}
    choice = {"index": 0, "finish_reason": "stop", **text}
    return {"id": leg.body["rid"], "model": MODEL, "choices": [choice], "usage": usage}


def events_of(leg: Leg, *, count: int = 3) -> Iterator[bytes]:
    """A stream's events in the shape of the leg's API, without its end."""
    for number in range(count):
        if leg.path == "/generate":
            event: dict[str, Any] = {"text": f"t{number}", "meta_info": {"id": leg.body["rid"]}}
        else:
            choices = [{"index": 0, "text": f"t{number}"}]
            event = {"id": leg.body["rid"], "choices": choices, "usage": None}
        yield b"data: %b\n\n" % json.dumps(event).encode()
    if leg.body.get("stream_options"):
        usage = {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
        event = {"id": leg.body["rid"], "choices": [], "usage": usage}
        yield b"data: %b\n\n" % json.dumps(event).encode()


async def answer(leg: Leg, request: web.Request) -> web.StreamResponse:
    """Prefill says that it is done; decode answers or streams."""
    if leg.worker.role is Role.PREFILL:
        return web.json_response({"done": True})
    if not leg.stream:
        return web.json_response(answer_of(leg))
    response = await begin_stream(request)
    for event in events_of(leg):
        await response.write(event)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


async def never(leg: Leg, request: web.Request) -> web.StreamResponse:
    """Take the leg and say nothing."""
    await asyncio.Event().wait()
    raise AssertionError


def refuse(status: int, reason: str, *, message: str = "no") -> Behaviour:
    """Answer with an error in our shape."""

    async def behave(leg: Leg, request: web.Request) -> web.StreamResponse:
        body = {"error": {"message": message, "type": "x", "code": reason, "param": None}}
        return web.json_response(body, status=status, headers={"x-pd-reason": reason})

    return behave


async def hang_up(leg: Leg, request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return await never(leg, request)


def stream_then(*, events: int, end: Behaviour) -> Behaviour:
    """Stream some events, then do something else."""

    async def behave(leg: Leg, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request)
        for event in events_of(leg, count=events):
            await response.write(event)
        await leg.worker.note()
        return await end(leg, request)

    return behave


# --- a router among them ------------------------------------------------------------------------


class World:
    """A running router with its workers."""

    def __init__(self, router: Router, workers: list[CannedWorker]) -> None:
        self.router = router
        self.workers = workers
        self.prefill = next(worker for worker in workers if worker.role is Role.PREFILL)
        self.decode = next(worker for worker in workers if worker.role is Role.DECODE)
        self.url = f"http://127.0.0.1:{router.port}"
        self.admin_url = f"http://127.0.0.1:{router.admin_port}"
        self.signer = HttpSigner(RING, os.urandom(8).hex())

    def legs(self, role: Role) -> list[Leg]:
        return [leg for worker in self.workers if worker.role is role for leg in worker.legs]


def pair_of_workers() -> list[CannedWorker]:
    return [CannedWorker(Role.PREFILL), CannedWorker(Role.DECODE)]


@asynccontextmanager
async def world(
    folder: Path,
    *,
    workers: list[CannedWorker] | None = None,
    wait: bool = True,
    limits: ServeLimits | None = None,
    **changes: Any,
) -> AsyncIterator[World]:
    """A router over canned workers, ready to be used; `changes` are fields of its configuration."""
    workers = pair_of_workers() if workers is None else workers
    for worker in workers:
        if not worker.engine_ports:
            await worker.start()
    fields: dict[str, Any] = {
        "cluster": CLUSTER,
        "port": 0,
        "admin_port": 0,
        "keys_folder": str(folder),
        "served_name": MODEL,
        "max_context": 512,
        "members": tuple(worker.member for worker in workers),
        "timeouts": Timeouts(queue_seconds=5, bootstrap_seconds=5, stall_seconds=5),
    }
    router = Router(RouterConfig(**(fields | changes)), RING, limits=limits)
    await router.start()
    try:
        if wait:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await router.wait_ready()
        yield World(router, workers)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await router.close()
        for worker in workers:
            await worker.stop()
