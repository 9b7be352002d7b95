"""Addresses and port ranges that nothing else of this machine uses, fresh for every test.

A port that a killed process listened on is unusable for a minute once it had connections, so a
range that came again at once would run dry after some restarts.
"""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any

RANGE = 32
FIRST = 17200
"""Above what a local run takes, below the ports that the kernel gives to clients."""
LAST = 32000

_starts = itertools.count(os.getpid() * 4)
_hosts = itertools.count(1)


def transfer_ports() -> dict[str, Any]:
    """Fields of an `EngineConfig`: 32 ports that no recent engine of this run has used."""
    start = FIRST + next(_starts) * RANGE % (LAST - FIRST)
    return {"transport_port_min": start, "transport_port_max": start + RANGE - 1}


def fresh_host() -> str:
    """A loopback address that no other test of this run uses."""
    number = next(_hosts)
    return f"127.64.{100 + os.getpid() % 100}.{number % 254 + 1}"


def free_ports() -> tuple[str, str]:
    """Two ports on 127.0.0.1 that nobody listens on."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        return str(one.getsockname()[1]), str(two.getsockname()[1])
