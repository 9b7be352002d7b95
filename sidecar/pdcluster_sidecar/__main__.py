"""`python -m pdcluster_sidecar --config FILE`: one sidecar process, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Sequence

import uvloop

from pdcluster_protocol.authentication import KeyRing
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_sidecar.config import read_arguments, render
from pdcluster_sidecar.keys import load_keys
from pdcluster_sidecar.parent import die_with_parent
from pdcluster_sidecar.sidecar import Sidecar
from pdcluster_sidecar.telemetry import configure_logging, log_callbacks

EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; gives its exit status."""
    try:
        arguments = read_arguments(sys.argv[1:] if argv is None else argv)
        if arguments.print_config:
            sys.stdout.write(render(arguments.config) + "\n")
            return 0
        die_with_parent()
        ring = load_keys(arguments.config.keys_folder)
        uvloop.run(_serve(arguments.config, ring))
    except ConfigError as error:
        sys.stderr.write(f"pdcluster-sidecar: {error.detail}\n")
        return EXIT_CONFIG
    return 0


async def _serve(config: SidecarConfig, ring: KeyRing) -> None:
    # Libraries left a hundred thousand objects; walking them would stop the relay for milliseconds.
    gc.freeze()
    log = configure_logging(component="sidecar", instance=config.instance, role=config.role)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log_callbacks(loop, log)
    try:
        await Sidecar(config, ring, log=log).run(stop)
    except ConfigError:
        raise
    except Exception:
        log.exception("sidecar failed")
        raise


if __name__ == "__main__":
    sys.exit(main())
