"""The router's process: configuration, logging, signals, exit codes.

Exit codes: 0 asked to stop, 2 the configuration is wrong or a port is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from pdcluster_protocol.config import RouterConfig, decode_config
from pdcluster_protocol.errors import ConfigError
from pdcluster_sidecar.keys import load_keys
from pdcluster_sidecar.parent import die_with_parent
from pdcluster_sidecar.router.app import Router
from pdcluster_sidecar.telemetry import configure_logging, log_callbacks

EXIT_CONFIG: Final = 2
CONFIG_BYTES_MAX: Final = 8 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run one router until it is asked to stop; returns the exit code."""
    arguments = _parse(argv)
    try:
        config = _read_config(arguments.config)
        if arguments.print_config:
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
            return 0
        die_with_parent()
        uvloop.run(_serve(config))
    except ConfigError as error:
        sys.stderr.write(f"pdcluster-router: {error.detail}\n")
        return EXIT_CONFIG
    return 0


async def _serve(config: RouterConfig) -> None:
    log = configure_logging(instance=config.instance, role="router")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log_callbacks(loop, log)
    router = Router(config, load_keys(config.keys_folder))
    try:
        await router.start()
        log.info("listening", host=config.host, port=router.port, admin_port=router.admin_port)
        await stop.wait()
        log.info("stopping")
    finally:
        await router.close()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pdcluster-router", description="One router process.")
    parser.add_argument("--config", required=True, metavar="FILE", help="RouterConfig as JSON")
    parser.add_argument(
        "--print-config", action="store_true", help="show the whole configuration and exit"
    )
    return parser.parse_args(argv)


def _read_config(path: str) -> RouterConfig:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"--config is {path!r}: {error.strerror}") from error
    return decode_config(raw, RouterConfig, source=path)
