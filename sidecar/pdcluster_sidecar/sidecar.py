"""One sidecar process put together: link, ranks, relay, heartbeat, HTTP; and taken apart again."""

from __future__ import annotations

import asyncio
import errno
import secrets
from typing import Final, cast

import structlog
from aiohttp import web

from pdcluster_protocol.authentication import HttpSigner, HttpVerifier, KeyRing
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.limits import Limits
from pdcluster_sidecar.app import build_app
from pdcluster_sidecar.client import SidecarClient
from pdcluster_sidecar.connections import CONNECTIONS
from pdcluster_sidecar.context import Context
from pdcluster_sidecar.follower import Follower, FollowerRelay
from pdcluster_sidecar.heartbeat import beat
from pdcluster_sidecar.link import LinkServer
from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.relay import Relay
from pdcluster_sidecar.route_path import RoutePath
from pdcluster_sidecar.server_log import server_logger
from pdcluster_sidecar.telemetry import Metrics

CLOSE_SECONDS: Final = 1.0


class Sidecar:
    """Starts and ends everything, in this order: what others could reach comes last."""

    def __init__(
        self,
        config: SidecarConfig,
        ring: KeyRing,
        *,
        log: structlog.typing.FilteringBoundLogger,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        signer = HttpSigner(ring, secrets.token_hex(8))
        verifier = HttpVerifier(ring)
        self._config = config
        self._log = log
        self._metrics = Metrics()
        context = Context(config, signer.session, limits, self._metrics, log)
        self._client = SidecarClient(signer, verifier)
        self._ranks = Ranks(context)
        self._follower: Follower | None = None
        self._relay = self._make_relay(context, ring)
        self._ranks.listener = self._relay
        self._links = LinkServer(config.link_path, self._ranks)
        app = build_app(
            config,
            ranks=self._ranks,
            relay=self._relay,
            metrics=self._metrics,
            signer=signer,
            verifier=verifier,
        )
        self._connections = app[CONNECTIONS]
        self._runner = web.AppRunner(
            app, access_log=None, logger=server_logger(), shutdown_timeout=CLOSE_SECONDS
        )
        self._route_path = RoutePath(
            config, self._ranks.registry, verifier, library=self._library_connection
        )
        self._server: asyncio.Server | None = None

    def _make_relay(self, context: Context, ring: KeyRing) -> Relay:
        """The relay, and in a pod that does not lead also what speaks with the leader."""
        leader, client, ranks = self._config.leader, self._client, self._ranks
        if leader is None:
            relay = Relay(context, ring, client=client, ranks=ranks)
            ranks.pods.peers = relay.living_cards
            return relay
        follower_relay = FollowerRelay(context, ring, client=client, ranks=ranks, leader=leader)
        self._follower = Follower(context, leader, client=client, ranks=ranks, relay=follower_relay)
        ranks.upstream = self._follower
        return follower_relay

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, or until a part of us fails.

        Raises:
            ConfigError: a port or path cannot be bound.
        """
        try:
            await self._start()
            pulse = (
                beat(self._relay, self._metrics) if self._follower is None else self._follower.run()
            )
            heart = asyncio.create_task(pulse, name="heartbeat")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait({heart, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if heart.done():
                # It runs for ever, so this raises what ended it.
                heart.result()
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
            self._log.info("sidecar stops")
        finally:
            await self._close()

    async def _start(self) -> None:
        config = self._config
        self._relay.start()
        await self._links.start()
        await self._runner.setup()
        # Who asks before that takes a living engine for a dead one. Nobody asks a pod that does not
        # lead, and its ranks are let in only once it reports, which begins behind this.
        if self._follower is None and not await self._links.rejoined():
            self._log.warning("no engine came back", link=config.link_path)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._route_path, config.host, config.http_port, backlog=512
            )
        except OSError as error:
            busy = error.errno == errno.EADDRINUSE
            what = "is busy" if busy else f"cannot be bound ({error.strerror})"
            raise ConfigError(
                f"http_port: {config.host}:{config.http_port} {what}; choose another http_port or"
                " end the process that holds it"
            ) from error
        self._log.info(
            "sidecar serves",
            http=f"{config.host}:{config.http_port}",
            control_port=config.control_port,
            link=config.link_path,
        )

    def _library_connection(self) -> asyncio.Protocol:
        # It is there since the set-up, which comes before the first connection.
        return self._connections.admit(cast("web.Server", self._runner.server))

    async def _close(self) -> None:
        self._ranks.standing.close()
        await self._links.close()
        if self._server is not None:
            self._server.close()
        self._route_path.close()
        await self._runner.cleanup()
        await self._relay.close()
        await self._client.close()
