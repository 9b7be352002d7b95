"""A transport inside a process of its own, driven over its standard streams.

    python -m support.transport_program HOST PORT_MIN NBYTES

Commands and answers are lines of JSON. Events of the transport come as they occur.
"""

from __future__ import annotations

import os
import random
import selectors
import sys
from typing import Any

import msgspec

from pdcluster_engine.memory.window import ArenaMemory, HostWindow
from pdcluster_engine.transport.inprocess import InProcessTransport
from pdcluster_engine.transport.linux import map_shared, view
from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import DigestRequest, WriteRequest
from pdcluster_protocol.errors import TransportError
from support.ports import RANGE

ARENA_ADDRESS = 0x2000_0000_0000


class Program:
    """One arena, one transport, one loop."""

    def __init__(self, host: str, port_min: int, nbytes: int) -> None:
        fd = os.memfd_create("arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        address = map_shared(fd, nbytes, address=ARENA_ADDRESS)
        self.bytes = view(address, nbytes)
        settings = Settings(host=host, port_min=port_min, port_max=port_min + RANGE - 1)
        memory = ArenaMemory(address=address, nbytes=nbytes, window=HostWindow(self.bytes))
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
                self.bytes[:] = random.Random(command["seed"]).randbytes(len(self.bytes))
                say(event="Filled")
            case "fence":
                self.transport.fence()
            case "look":
                window = HostWindow(self.bytes)
                say(event="Seen", digest=window.digest(0, len(self.bytes)))

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


def event_fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def say(**fields: Any) -> None:
    os.write(1, msgspec.json.encode(fields) + b"\n")


if __name__ == "__main__":
    Program(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run()
    # Leaving without unwinding, as the engine does.
    os._exit(0)
