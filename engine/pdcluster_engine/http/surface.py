"""What stands beside the computing paths: health, what this server is, load, abort, metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pdcluster_engine.http.compute import NANOSECONDS, Aliases
from pdcluster_engine.http.door import Door
from pdcluster_engine.http.exchange import Exchange
from pdcluster_engine.http.loads import loads_answer, older_loads_answer, rank_load
from pdcluster_engine.http.metrics import HttpMetrics
from pdcluster_engine.http.refusals import JSON
from pdcluster_engine.http.sequences import Sequence, mint_key
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.submission import Engine, Submission
from pdcluster_protocol.config import SIDECAR_HTTP_PORT, EngineConfig
from pdcluster_protocol.errors import InvalidRequest, NotReady, PDClusterError, Reason
from pdcluster_protocol.undecodable import UNDECODABLE

HEALTH_TOKEN_ID = 0
HEALTH_GENERATE_SECONDS = 20.0
STANDSTILL_SECONDS = 2.0
VERSION = metadata.version("pdcluster")


class AbortBody(msgspec.Struct, frozen=True):
    """SGLang's `/abort_request`; one exact rid."""

    rid: str = ""
    abort_all: bool = False


class Surface:
    """Answers everything that does not compute for a client."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        *,
        door: Door,
        metrics: HttpMetrics,
        aliases: Aliases,
    ) -> None:
        self._engine = engine
        self._config = config
        self._door = door
        self._metrics = metrics
        self._aliases = aliases
        self._started = time.time_ns() // NANOSECONDS
        self._loops = (-1, 0.0)

    def routes(self) -> list[web.RouteDef]:
        """All paths, SGLang's older names included."""
        return [
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/ready", self.ready),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{id:.+}", self.model),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/v1/loads", self.loads),
            web.get("/get_load", self.older_loads),
            web.get("/metrics", self.metrics),
            web.post("/abort_request", self.abort_request),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """200 while the owner's loop counter moves."""
        loops, now = self._engine.state().loops, time.monotonic()
        if loops != self._loops[0]:
            self._loops = (loops, now)
        if now - self._loops[1] > STANDSTILL_SECONDS:
            raise NotReady(f"the engine's loop has stood still at {loops}; restart the process")
        return web.Response(text="OK", headers={"x-pd-loops": str(loops)})

    async def health_generate(self, _request: web.Request) -> web.Response:
        """200 once one token was computed here; 503 otherwise, at the latest after 20 s."""
        submission = Submission(
            key=mint_key(),
            rid=f"HEALTH_CHECK_{secrets.token_hex(8)}",
            token_ids=(HEALTH_TOKEN_ID,),
            sampling=SamplingParameters(temperature=0.0),
            output_tokens_max=1,
        )
        exchange = Exchange(self._engine, [Sequence(0, 0, submission)])
        try:
            exchange.submit()
            async with asyncio.timeout(HEALTH_GENERATE_SECONDS):
                while exchange.open:
                    await exchange.fresh()
        except TimeoutError as error:
            raise NotReady(f"no token within {HEALTH_GENERATE_SECONDS:g} s") from error
        except PDClusterError as error:
            raise NotReady(f"no token: {error.detail}") from error
        finally:
            exchange.cancel(Reason.ABORTED, "health check")
        return web.Response(text="OK")

    async def ready(self, _request: web.Request) -> web.Response:
        """200 or 503, without a body."""
        return web.Response(status=200 if self._engine.state().ready else 503)

    async def models(self, _request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name != self._config.served_name:
            raise InvalidRequest(
                f"model is {name[:64]!r}; it must be {self._config.served_name}",
                field="model",
                reason=Reason.MODEL_NOT_FOUND,
            )
        return _json(self._model())

    async def server_info(self, _request: web.Request) -> web.Response:
        """What SGLang's router reads when it registers a worker; JSON types are its contract."""
        config, load = self._config, self._engine.state().load
        tokens = load.pages_total * config.page_size
        return _json(
            {
                "model_path": config.model_source,
                "tokenizer_path": config.model_source,
                "served_model_name": config.served_name,
                "host": config.host,
                "port": config.http_port,
                "tp_size": config.parallel.tp,
                "dp_size": config.parallel.dp,
                "pp_size": config.parallel.pp,
                "page_size": config.page_size,
                "context_length": config.max_context,
                "max_req_input_len": config.max_context - 1,
                "max_total_num_tokens": tokens,
                "max_total_tokens": tokens,
                "max_prefill_tokens": config.max_context,
                "max_running_requests": config.sequences,
                "chunked_prefill_size": config.chunk,
                "load_balance_method": "follow_bootstrap_room",
                "disaggregation_mode": config.role.value,
                "disaggregation_bootstrap_port": SIDECAR_HTTP_PORT,
                "disaggregation_transfer_backend": config.transport,
                "startup_time": self._started,
                "version": VERSION,
                "frontend": "pdcluster",
                "internal_states": [rank_load(config, load)],
                "pd_instance": config.instance,
                "pd_fingerprint": config.fingerprint,
                "pd_faults": config.faults,
            }
        )

    async def model_info(self, _request: web.Request) -> web.Response:
        config = self._config
        return _json(
            {
                "model_path": config.model_source,
                "tokenizer_path": config.model_source,
                "served_model_name": config.served_name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": config.role.value,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_source.rpartition("/")[2],
                "architectures": [],
            }
        )

    async def loads(self, _request: web.Request) -> web.Response:
        load = self._engine.state().load
        return _json(
            loads_answer(
                self._config, load, version=VERSION, unix_seconds=time.time_ns() / NANOSECONDS
            )
        )

    async def older_loads(self, _request: web.Request) -> web.Response:
        return _json(older_loads_answer(self._config, self._engine.state().load))

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._metrics.registry),
            headers={"Content-Type": CONTENT_TYPE_LATEST},
        )

    async def abort_request(self, request: web.Request) -> web.Response:
        """End the live request with exactly this rid; an empty or unknown one ends nothing."""
        body, signed = await self._door.read(request)
        self._door.require_member(signed=signed)
        try:
            asked = msgspec.json.decode(body, type=AbortBody)
        except UNDECODABLE as error:
            raise InvalidRequest(f'the body must be {{"rid": "…"}}: {error}') from error
        if asked.abort_all:
            raise InvalidRequest(
                "abort_all is true; only exact rids can be aborted here",
                field="abort_all",
                reason=Reason.UNSUPPORTED,
            )
        if asked.rid and not self._engine.cancel_rid(asked.rid, Reason.ABORTED):
            self._aliases.cancel(asked.rid, Reason.ABORTED)
        return web.Response()

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._config.served_name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdcluster",
            "root": self._config.model_source,
            "max_model_len": self._config.max_context,
        }


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)
