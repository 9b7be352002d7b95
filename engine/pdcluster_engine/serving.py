"""The asyncio side of an engine process: HTTP up, link open, signals, the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING

import structlog

from pdcluster_engine.assembly import Assembly
from pdcluster_engine.http import build_app, serve
from pdcluster_engine.text import TextCodec
from pdcluster_protocol.config import EngineConfig

if TYPE_CHECKING:
    from pdcluster_protocol.authentication import KeyRing

DRAIN_SECONDS = 1.0
"""What running requests get after SIGTERM; a pod's longer drain happens before that signal."""
CLEANUP_SECONDS = 0.3

log = structlog.get_logger()


async def serve_until_stopped(
    assembly: Assembly, config: EngineConfig, *, codec: TextCodec, ring: KeyRing, started: float
) -> None:
    """Serve until SIGTERM or SIGINT, then drain briefly.

    The sidecar is dialled only once HTTP listens: whoever hears of this rank can reach it.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = await serve(
        build_app(assembly.engine, codec, config, ring), config.host, config.http_port
    )
    assembly.loop.open_link()
    log.info("serving", startup_seconds=round(time.monotonic() - started, 3))
    await stop.wait()
    await asyncio.to_thread(assembly.engine.drain, DRAIN_SECONDS)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.cleanup(), CLEANUP_SECONDS)
    log.info("stopped", reason="ShuttingDown")
