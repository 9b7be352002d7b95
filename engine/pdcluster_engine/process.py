"""One engine process from its configuration file to its exit code.

    main    asyncio: HTTP, signals, the end
    owner   node, link, transport
    model   forwards
    device  on a GPU: passes on what the model thread says once the device has done it

    0  asked to stop              3  the sidecar refuses this rank
    1  a thread failed            4  the transport cannot run here
    2  the configuration is wrong, or the machine does not fit it

A thread that fails ends the process at once: its sockets close, the sidecar sees it, and peers
know within milliseconds. The transfer process dies with it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import structlog

from pdcluster_engine.environment import follow_parent, prepare_environment
from pdcluster_engine.link import LinkRefused
from pdcluster_protocol.config import EngineConfig, decode_config
from pdcluster_protocol.errors import ConfigError, PDClusterError, TransportError

if TYPE_CHECKING:
    from pdcluster_engine.assembly import Assembly

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_REFUSED = 3
EXIT_TRANSPORT = 4
_JOIN_SECONDS = 0.3
_CONFIG_BYTES_MAX = 1 << 20

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine; returns its exit code once everything it started has ended."""
    started = time.monotonic()
    arguments = _parse(argv)
    try:
        config = _read_config(arguments.config)
        if arguments.print_config:
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
            return 0
        prepare_environment()
        follow_parent()
        return _run(config, started)
    except ConfigError as error:
        sys.stderr.write(f"pdcluster-engine: {error.detail}\n")
        return EXIT_CONFIG


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pdcluster-engine", description="One native engine: a rank with model and page pool."
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="EngineConfig as JSON")
    parser.add_argument(
        "--print-config", action="store_true", help="show the whole configuration and exit"
    )
    return parser.parse_args(argv)


def _read_config(path: str) -> EngineConfig:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_CONFIG_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"--config is {path!r}: {error.strerror}") from error
    return decode_config(raw, EngineConfig, source=path)


def _run(config: EngineConfig, started: float) -> int:
    """Load, assemble, serve. The imports wait for `prepare_environment`."""
    from pdcluster_engine.assembly import assemble
    from pdcluster_engine.keys import load_keys
    from pdcluster_engine.model.loading import load_runner
    from pdcluster_engine.serving import serve_until_stopped
    from pdcluster_engine.telemetry import Telemetry, configure_logging

    configure_logging(instance=config.instance, role=str(config.role), dp_rank=config.dp_rank)
    ring = load_keys(config.keys_folder)
    model = load_runner(
        config.model_source,
        dtype=config.dtype,
        mode=config.mode,
        threads=config.threads,
        page_size=config.page_size,
        device=config.device,
    )
    assembly = assemble(config, model, telemetry=Telemetry())
    # Libraries left half a million objects; walking them would stop every thread for a while.
    gc.freeze()
    threads = [
        _start("owner", assembly.loop.run),
        _start("model", assembly.compute.run),
    ]
    if assembly.gate is not None:
        threads.append(_start("device", assembly.gate.run))
    try:
        asyncio.run(
            serve_until_stopped(assembly, config, codec=model.tokenizer, ring=ring, started=started)
        )
    finally:
        _end(assembly, threads)
    return 0


def _start(name: str, body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=_guard, args=(name, body), name=name, daemon=True)
    thread.start()
    return thread


def _guard(name: str, body: Callable[[], None]) -> None:
    """The outermost frame of a thread: what comes up to here ends the process."""
    try:
        body()
    except PDClusterError as error:
        # To leave with an instance that has ended is an order, and no fault of this process.
        note = log.error if isinstance(error, LinkRefused) else log.critical
        note("thread_ended", thread=name, reason=str(error.reason), detail=error.detail)
        _leave(_exit_code(error))
    except Exception:
        # Whatever it was, half an engine must not go on serving.
        log.critical("thread_failed", thread=name, exc_info=True)
        _leave(EXIT_FAILED)


def _exit_code(error: PDClusterError) -> int:
    if isinstance(error, LinkRefused):
        return EXIT_REFUSED
    if isinstance(error, TransportError):
        return EXIT_TRANSPORT
    return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


def _leave(code: int) -> NoReturn:
    """End now: other threads may hang in a forward or wait for this one."""
    sys.stderr.flush()
    os._exit(code)


def _end(assembly: Assembly, threads: list[threading.Thread]) -> None:
    """Stop both threads; one that is deep in a forward is left to the end of the process."""
    assembly.compute.shut_down()
    assembly.loop.stop()
    if assembly.gate is not None:
        assembly.gate.shut_down()
    for thread in threads:
        thread.join(_JOIN_SECONDS)
    if not any(thread.is_alive() for thread in threads):
        assembly.inbox.close()
        for arena in assembly.arenas:
            arena.close()
