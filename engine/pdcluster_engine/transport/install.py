"""What a machine must have before a transfer process starts, checked without importing it."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import Literal

from pdcluster_protocol.errors import ConfigError

FabricProtocol = Literal["tcp", "rdma"]

DISTRIBUTION_PREFIX = "mooncake_transfer_engine"
VERSION_MIN = (0, 3, 13)
"""Older releases call a write complete before the receiver has applied it."""
PORTS_MIN = 8

INFINIBAND = Path("/sys/class/infiniband")

DEBIAN_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libmlx5.so.1": "ibverbs-providers",
    "libstdc++.so.6": "libstdc++6",
    "libcudart.so.12": "the CUDA 12 runtime (pip install nvidia-cuda-runtime-cu12)",
    "libcudart.so.13": "the CUDA 13 runtime (pip install nvidia-cuda-runtime)",
    "libcuda.so.1": "the NVIDIA driver, or the wheel mooncake-transfer-engine-non-cuda on a CPU",
}


def check_machine(protocol: FabricProtocol, *, paths: list[str] | None = None) -> str:
    """Check library and fabric, and return the version of the installed Mooncake wheel.

    Raises:
        ConfigError: no wheel, two wheels, one too old, or rdma on a machine without an adapter.
    """
    version = mooncake_version(sys.path if paths is None else paths)
    if protocol == "rdma":
        check_rdma()
    return version


def check_device_wheel(paths: list[str] | None = None) -> None:
    """Refuse the wheel that would read device addresses as if they were the host's.

    Raises:
        ConfigError: naming the wheel and the one to install.
    """
    for path in sys.path if paths is None else paths:
        if any(Path(path or ".").glob(f"{DISTRIBUTION_PREFIX}_non_cuda-*.dist-info")):
            raise ConfigError(
                "device is cuda, but the Mooncake wheel mooncake-transfer-engine-non-cuda cannot "
                "reach device memory; repair: pip uninstall -y mooncake-transfer-engine-non-cuda "
                "&& pip install 'pdcluster[mooncake-cuda13]'"
            )


def mooncake_version(paths: list[str]) -> str:
    """The version of the one installed Mooncake distribution in `paths`."""
    found = sorted(
        {
            folder.name.removesuffix(".dist-info")
            for path in paths
            for folder in Path(path or ".").glob(f"{DISTRIBUTION_PREFIX}*.dist-info")
        }
    )
    if not found:
        raise ConfigError(
            "transport is mooncake, but no Mooncake wheel is installed; "
            "install one: pip install 'pdcluster[mooncake-cpu]'"
        )
    if len(found) > 1:
        names = [name.rpartition("-")[0].replace("_", "-") for name in found]
        raise ConfigError(
            f"Mooncake wheels that overwrite each other are installed ({', '.join(found)}); "
            f"repair: pip uninstall -y {' '.join(names)} && pip install 'pdcluster[mooncake-cpu]'"
        )
    version = found[0].rpartition("-")[2]
    if _numbers(version) < VERSION_MIN:
        raise ConfigError(
            f"Mooncake {version} is too old: its writes are not acknowledged; "
            f"install {'.'.join(map(str, VERSION_MIN))} or newer"
        )
    return version


def check_rdma(folder: Path = INFINIBAND) -> None:
    """Refuse rdma where the library would silently use TCP."""
    try:
        adapters = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        adapters = []
    if not adapters:
        raise ConfigError(
            f"transport protocol is rdma, but {folder} shows no adapter; "
            "give the pod one, or set the protocol to tcp"
        )


def check_address(host: str, *, port_min: int, port_max: int) -> None:
    """Refuse what peers could not reach, or ports too few for a few restarts.

    Raises:
        ConfigError: naming the field, the value and the fix.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(
            f"transport host is {host!r}; it must be the pod's IP address, not a name"
        ) from error
    if address.is_unspecified:
        raise ConfigError(f"transport host is {host}; peers cannot write there, give the pod's IP")
    if not 1024 <= port_min <= port_max <= 65535 or port_max - port_min + 1 < PORTS_MIN:
        raise ConfigError(
            f"transport ports are {port_min} to {port_max}; "
            f"give at least {PORTS_MIN} ports between 1024 and 65535"
        )


def explain_import(error: ImportError) -> str:
    """Name the missing library and the package that has it."""
    for library, package in DEBIAN_PACKAGES.items():
        if library in str(error):
            return f"Mooncake needs {library}; install {package}"
    return f"Mooncake cannot be imported ({error}); reinstall its wheel"


def _numbers(version: str) -> tuple[int, ...]:
    parts: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
