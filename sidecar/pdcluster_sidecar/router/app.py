"""One router, assembled: its two ports, its watches, and what ends it."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Final

import structlog
from aiohttp import web

from pdcluster_protocol.authentication import HttpSigner, HttpVerifier, KeyRing
from pdcluster_protocol.config import RouterConfig
from pdcluster_protocol.errors import ConfigError, Reason
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import InstanceCard
from pdcluster_protocol.pair import PeerDead, PeerHeard, PeerSilent
from pdcluster_sidecar.router.admin import Admin
from pdcluster_sidecar.router.admission import Admission
from pdcluster_sidecar.router.alarms import Alarms
from pdcluster_sidecar.router.calls import SidecarCalls
from pdcluster_sidecar.router.canary import Canary
from pdcluster_sidecar.router.front import Front
from pdcluster_sidecar.router.legs import LegPool
from pdcluster_sidecar.router.listening import ServeLimits, Server
from pdcluster_sidecar.router.members import Members
from pdcluster_sidecar.router.routes import Routes
from pdcluster_sidecar.router.running import Running
from pdcluster_sidecar.router.sequence import Sequence, Surroundings
from pdcluster_sidecar.router.serve import ClientConnection
from pdcluster_sidecar.router.telemetry import Metrics
from pdcluster_sidecar.server_log import server_logger

DRAIN_SECONDS: Final = 1.0
BACKLOG: Final = 1024

log = structlog.get_logger()


class Router:
    """A router process's whole inside; `start` opens the ports, `close` ends everything."""

    def __init__(
        self, config: RouterConfig, ring: KeyRing, *, limits: ServeLimits | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        signer = HttpSigner(ring, secrets.token_hex(16))
        ours = _our_card(config, signer.session)
        self._config = config
        self._calls = SidecarCalls(signer, HttpVerifier(ring))
        self._members = Members(config, self._calls, ours=ours, now=loop.time)
        self._metrics = Metrics()
        self._pool = LegPool(signer, now=loop.time)
        self._admission = Admission(
            self._members.groups,
            # Not a secret: it spreads load.
            random.Random(),  # noqa: S311  The dice of a load balancer guard nothing.
            max_in_flight=config.max_in_flight,
            max_queued=config.max_queued,
            in_turn=config.policy == "RoundRobin",
        )
        self._running: Running[Sequence] = Running()
        self._shared = Surroundings(
            pool=self._pool,
            calls=self._calls,
            members=self._members,
            admission=self._admission,
            metrics=self._metrics,
            running=self._running,
            alarms=Alarms(),
            # Bound once: the module's own logger is put together anew for every line.
            log=structlog.get_logger().bind(),
            retries=config.retries,
        )
        self._front = Front(config, self._shared)
        routes = Routes(
            config,
            self._front.compute,
            self._shortage,
            created_seconds=time.time_ns() // 1_000_000_000,
        )
        self._server = Server(
            routes.handle,
            limits or ServeLimits(body_bytes_max=config.body_bytes_max),
            now=loop.time,
        )
        self._admin = Admin(
            config,
            self._members,
            self._metrics,
            HttpVerifier(ring),
            Canary(config, self._shared).run,
        )
        self._reported = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._connect_parts()

    @property
    def port(self) -> int:
        """The client port; configured as 0, the one that was given."""
        if self._listener is None:
            return self._config.port
        return int(self._listener.sockets[0].getsockname()[1])

    @property
    def admin_port(self) -> int:
        if self._runner is None or not self._runner.addresses:
            return self._config.admin_port
        return int(self._runner.addresses[0][1])

    @property
    def in_flight_count(self) -> int:
        return self._admission.in_flight_count

    @property
    def queued_count(self) -> int:
        return self._admission.queued_count

    async def start(self) -> None:
        """Open both ports and begin to watch.

        Raises:
            ConfigError: a port is taken, or the host is none of ours.
        """
        loop = asyncio.get_running_loop()
        config = self._config
        try:
            self._listener = await loop.create_server(
                lambda: ClientConnection(self._server),
                config.host,
                config.port,
                backlog=BACKLOG,
                # Never unasked: a second cluster on a taken port must be an error, not half of it.
                reuse_port=config.port_shared or None,
            )
        except OSError as error:
            raise _cannot_listen("port", config.host, config.port, error) from error
        self._runner = web.AppRunner(
            self._admin.application(),
            access_log=None,
            logger=server_logger(),
            handle_signals=False,
            shutdown_timeout=0.2,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host, config.admin_port).start()
        except OSError as error:
            raise _cannot_listen("admin_port", config.host, config.admin_port, error) from error
        self._members.start()
        self._sweeper = loop.create_task(self._sweep())

    async def wait_ready(self) -> None:
        """Wait until a pair can be had."""
        while not self._admission.has_pair(None):
            self._reported.clear()
            await self._reported.wait()

    async def close(self) -> None:
        """Take nothing new, give what runs a moment, end the rest with its reason."""
        self._front.closing = True
        if self._listener is not None:
            self._listener.close()
        self._server.close_idle()
        await self._running.wait_idle(seconds=DRAIN_SECONDS)
        for sequence in self._running.sequences():
            sequence.leave("this router is shutting down", reason=Reason.SHUTTING_DOWN)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._front.close()
        await self._members.close()
        self._shared.alarms.close()
        await self._pool.close()
        await self._calls.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._server.abort_all()

    def _connect_parts(self) -> None:
        self._members.on_change = self._member_reported
        self._members.on_dead = self._instance_died
        self._members.on_silent = self._instance_silent
        self._members.on_heard = self._instance_heard
        watch = self._metrics.watch
        watch("pdcluster_queue_depth", "Sequences that wait", self._count_queued)
        watch("pdcluster_in_flight", "Sequences that run", self._count_in_flight)
        watch("pdcluster_client_connections", "Open connections of clients", self._count_clients)
        watch("pdcluster_aborts_undelivered", "Aborts that reached no sidecar", self._count_lost)

    def _shortage(self) -> str:
        return "" if self._admission.has_pair(None) else self._members.shortage()

    def _member_reported(self) -> None:
        self._reported.set()
        self._admission.wake()

    def _instance_died(self, incarnation: str, detail: str) -> None:
        for sequence in self._running.sequences():
            sequence.peer_event(PeerDead(incarnation, detail))

    def _instance_silent(self, incarnation: str) -> None:
        for sequence in self._running.sequences():
            sequence.peer_event(PeerSilent(incarnation))

    def _instance_heard(self, incarnation: str) -> None:
        for sequence in self._running.sequences():
            sequence.peer_event(PeerHeard(incarnation))

    def _count_queued(self) -> float:
        return float(self._admission.queued_count)

    def _count_in_flight(self) -> float:
        return float(self._admission.in_flight_count)

    def _count_clients(self) -> float:
        return float(self._server.connection_count)

    def _count_lost(self) -> float:
        return float(self._calls.aborts_failed)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._server.limits.sweep_seconds)
            self._server.sweep()
            self._pool.sweep()


def _our_card(config: RouterConfig, session: str) -> InstanceCard:
    """Who we are to sidecars."""
    return InstanceCard(
        cluster=config.cluster,
        instance=config.instance,
        role="router",
        incarnation="",
        session=session,
        http=RankAddress(config.host, config.admin_port),
        served_name=config.served_name,
        max_context=config.max_context,
    )


def _cannot_listen(name: str, host: str, port: int, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    return ConfigError(
        f"{name} is {port}: cannot listen on {host}:{port} ({why}); free it, or choose another"
    )
