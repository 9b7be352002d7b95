"""One door to all transports, so that the engine's configuration chooses and nothing else does."""

from __future__ import annotations

from typing import Literal, assert_never

from pdcluster_engine.memory.window import ArenaMemory
from pdcluster_engine.transport.inprocess import InProcessTransport
from pdcluster_engine.transport.install import (
    FabricProtocol,
    check_address,
    check_device_wheel,
    check_machine,
)
from pdcluster_engine.transport.local import LocalTransport
from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import Deadlines, Transport
from pdcluster_engine.transport.supervised import SupervisedTransport

Kind = Literal["mooncake", "local"]

START_SECONDS_IN_PROCESS = 120.0
"""Registering device memory pins all of it, which takes longer than mapping a memfd."""


def open_transport(  # noqa: PLR0913 - one field of the configuration each
    kind: Kind,
    *,
    arena_fd: int,
    arena_nbytes: int,
    host: str,
    port_min: int,
    port_max: int,
    protocol: FabricProtocol,
    device: str = "",
    deadlines: Deadlines | None = None,
) -> Transport:
    """Check the machine and make a transport that waits for its `start`.

    `arena_fd` is a memfd of at least `arena_nbytes`; it stays the caller's and must stay open.

    Raises:
        ConfigError: the address, the ports, the fabric or the installation cannot work.
    """
    clocks = Deadlines() if deadlines is None else deadlines
    match kind:
        case "mooncake":
            check_address(host, port_min=port_min, port_max=port_max)
            check_machine(protocol)
            settings = Settings(
                host=host,
                port_min=port_min,
                port_max=port_max,
                protocol=protocol,
                device=device,
                deadlines=clocks,
            )
            return SupervisedTransport(settings, arena_fd=arena_fd, arena_nbytes=arena_nbytes)
        case "local":
            return LocalTransport(arena_fd=arena_fd, arena_nbytes=arena_nbytes, deadlines=clocks)
        case _:
            assert_never(kind)


def open_in_process(
    memory: ArenaMemory,
    *,
    host: str,
    port_min: int,
    port_max: int,
    protocol: FabricProtocol,
    device: str = "",
) -> InProcessTransport:
    """Check the machine and make a Mooncake transport over memory that only this process has.

    `memory` stays the caller's and must outlive the transport; `device` names RDMA adapters.

    Raises:
        ConfigError: the address, the ports, the fabric or the installation cannot work.
    """
    check_address(host, port_min=port_min, port_max=port_max)
    check_machine(protocol)
    if memory.on_device:
        check_device_wheel()
    settings = Settings(
        host=host,
        port_min=port_min,
        port_max=port_max,
        protocol=protocol,
        device=device,
        deadlines=Deadlines(start_seconds=START_SECONDS_IN_PROCESS),
    )
    return InProcessTransport(settings, memory)
