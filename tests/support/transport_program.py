"""A transport inside a process of its own, driven over its standard streams.

    python -m support.transport_program HOST PORT_MIN NBYTES host|cuda

Commands and answers are lines of JSON. Events of the transport come as they occur.
"""

from __future__ import annotations

import os
import random
import selectors
import sys
from typing import Any

import msgspec

from pdcluster_engine.memory.window import ArenaMemory, ByteWindow, HostWindow
from pdcluster_engine.transport.inprocess import InProcessTransport
from pdcluster_engine.transport.linux import map_shared, view
from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import DigestRequest, WriteRequest
from pdcluster_protocol.errors import TransportError
from support.ports import RANGE

ARENA_ADDRESS = 0x2000_0000_0000


class Program:
    """One arena, one transport, one loop."""

    def __init__(self, host: str, port_min: int, nbytes: int, device: str) -> None:
        memory, self.window = host_memory(nbytes) if device == "host" else gpu_memory(nbytes)
        settings = Settings(host=host, port_min=port_min, port_max=port_min + RANGE - 1)
        self.transport = InProcessTransport(settings, memory)
        self._operations = 0

    def run(self) -> None:
        """Until the end of standard input."""
        self.transport.start()
        selector = selectors.DefaultSelector()
        selector.register(self.transport, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        pending = b""
        while True:
            woken = {key.fd for key, _ in selector.select(60)}
            for event in self.transport.events():
                say(event=type(event).__name__, **msgspec.to_builtins(event_fields(event)))
            if 0 not in woken:
                continue
            chunk = os.read(0, 1 << 16)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self.obey(msgspec.json.decode(line))
        self.transport.close()

    def obey(self, command: dict[str, Any]) -> None:
        match command.pop("do"):
            case "write":
                self.write(**command)
            case "digest":
                self._submit(DigestRequest(**command))
            case "fill":
                self.window.write(0, random.Random(command["seed"]).randbytes(self.window.nbytes))
                say(event="Filled")
            case "fence":
                self.transport.fence()
            case "look":
                say(event="Seen", digest=self.window.digest(0, self.window.nbytes))

    def write(self, target: str, source: int, address: int, nbytes: int, count: int = 1) -> None:
        """`count` equal writes; each gets the next operation number."""
        for _ in range(count):
            self._operations += 1
            self._submit(
                WriteRequest(self._operations, target, source, address, nbytes, digest=True)
            )

    def _submit(self, request: WriteRequest | DigestRequest) -> None:
        try:
            self.transport.submit(request)
        except TransportError as error:
            say(event="Refused", detail=error.detail)


def host_memory(nbytes: int) -> tuple[ArenaMemory, ByteWindow]:
    """Memory for the transport, and a window on it for the test."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    window = HostWindow(view(map_shared(fd, nbytes, address=ARENA_ADDRESS), nbytes))
    return ArenaMemory(address=ARENA_ADDRESS, nbytes=nbytes, window=window), window


def gpu_memory(nbytes: int) -> tuple[ArenaMemory, ByteWindow]:
    """The same on the first GPU, which this program alone needs torch for."""
    import torch

    from pdcluster_engine.memory.device import DeviceArena, require_device

    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=require_device("cuda"))
    arena = DeviceArena(tensor, metadata_offset=nbytes)
    return arena.memory(), arena.window


def event_fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def say(**fields: Any) -> None:
    os.write(1, msgspec.json.encode(fields) + b"\n")


if __name__ == "__main__":
    Program(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]).run()
    # Leaving without unwinding, as the engine does.
    os._exit(0)
