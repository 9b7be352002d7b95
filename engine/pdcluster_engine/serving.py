"""The asyncio side of an engine process: HTTP up, link open, signals, the end.

The first SIGTERM or SIGINT drains: new legs are refused with `ShuttingDown`, running ones may end
within `timeouts.drainSeconds`. Then, or with a second signal, what still runs is ended with that
reason, and so does the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING

import structlog

from pdcluster_engine.assembly import Assembly
from pdcluster_engine.http import build_app, serve
from pdcluster_engine.text import TextCodec
from pdcluster_protocol.config import EngineConfig

if TYPE_CHECKING:
    from pdcluster_protocol.authentication import KeyRing

NOTICE_SECONDS = 0.2
"""An idle engine stays so long: legs that were under way to it are refused in words."""
CUT_SECONDS = 0.5
"""For the ends of what is cut."""
CLEANUP_SECONDS = 0.3
"""For last answers that are written, and idle connections that are closed."""

log = structlog.get_logger()


async def serve_until_stopped(
    assembly: Assembly, config: EngineConfig, *, codec: TextCodec, ring: KeyRing, started: float
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

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
    stop.clear()
    await _drain(assembly, seconds=config.timeouts.drain_seconds, hurry=stop)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.cleanup(), CLEANUP_SECONDS)
    log.info("stopped", reason="ShuttingDown")


async def _drain(assembly: Assembly, *, seconds: float, hurry: asyncio.Event) -> None:
    """Wait until nothing runs, the time is over, or somebody is in a hurry; then cut the rest."""
    log.info("draining", reason="ShuttingDown", drain_seconds=seconds)
    loop = asyncio.get_running_loop()
    noticed_at = loop.time() + NOTICE_SECONDS
    drained = asyncio.Event()

    def drain() -> None:
        assembly.engine.drain(seconds)
        # After a hurried end nobody waits for this thread, and the loop is closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(drained.set)

    threading.Thread(target=drain, name="drain", daemon=True).start()
    waiting = [asyncio.create_task(event.wait()) for event in (drained, hurry)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    hurried = hurry.is_set()
    why = "it was told twice to stop" if hurried else f"it did not end within {seconds:g} s"
    await asyncio.to_thread(
        assembly.engine.cut, f"this engine is shutting down; {why}", CUT_SECONDS
    )
    if not hurried:
        await asyncio.sleep(noticed_at - loop.time())
