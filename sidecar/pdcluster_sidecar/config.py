"""Command line and configuration file; nothing else of the sidecar reads the environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdcluster_protocol.config import SidecarConfig, decode_config
from pdcluster_protocol.errors import ConfigError


class Arguments(NamedTuple):
    """What the command line asks for."""

    config: SidecarConfig
    print_config: bool


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the command line and read the file that it names.

    Raises:
        ConfigError: the file cannot be read, or a field in it is wrong.
    """
    parser = argparse.ArgumentParser(prog="pdcluster-sidecar", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="JSON of a SidecarConfig")
    parser.add_argument(
        "--print-config", action="store_true", help="print the merged configuration and exit"
    )
    parsed = parser.parse_args(argv)
    path = Path(parsed.config)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    return Arguments(decode_config(raw, SidecarConfig, source=str(path)), parsed.print_config)


def render(config: SidecarConfig) -> str:
    """The configuration with all defaults, as JSON; it holds no secrets."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2).decode()
