"""Two engines over device memory in one process of their own, compared with one of them alone.

    python -m support.device_program tensor|cuda|cuda:N MODEL MODE LENGTHS

`tensor` runs the path of a GPU over plain tensors in host memory, with marks that the "device"
reaches late, so that it can be tried on a machine without one. Answers are lines of JSON.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import msgspec
import pytest
import torch

from pdcluster_engine import assembly
from pdcluster_engine.memory import ranks
from pdcluster_engine.memory.device import DeviceArena
from pdcluster_engine.memory.finality import Mark
from pdcluster_engine.telemetry import configure_logging
from pdcluster_engine.transport.inprocess import InProcessTransport
from pdcluster_engine.transport.port import TransportEvent
from pdcluster_protocol.layout import KVLayout
from support.engine_pairs import Pair, Running, prompt
from support.owner import until

LATE_QUERIES = 3


class LateMark:
    """Reached at the fourth question."""

    def __init__(self) -> None:
        self._questions = 0

    def query(self) -> bool:
        self._questions += 1
        return self._questions > LATE_QUERIES


def use_tensors() -> None:
    """Have `assemble` take the device path for the device cpu."""

    def reserve(
        device: torch.device, layout: KVLayout, page_count: int, *, metadata_bytes: int
    ) -> DeviceArena:
        return DeviceArena.create(device, layout, page_count, metadata_bytes=metadata_bytes)

    def record() -> Mark:
        return LateMark()

    patch = pytest.MonkeyPatch()
    patch.setattr(ranks, "reserve", reserve)
    patch.setattr(assembly, "record_on", lambda _device: record)


def run(device: str, model: str, mode: str, lengths: list[int]) -> None:
    if device == "tensor":
        use_tensors()
        device = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(
            folder, transport="mooncake", model=f"builtin://{model}", mode=mode, device=device
        )
        for engine in (pair.prefill, pair.decode):
            assert isinstance(engine.parts.arenas[0], DeviceArena)
            assert engine.parts.gate is not None
        for length in lengths:
            say(length=length, **compare(pair, length))
        fence(pair.decode)
        say(fenced=True, **compare(pair, 100))
        pair.close()


def compare(pair: Pair, length: int) -> dict[str, Any]:
    """The outputs of decode alone and of the pair, and the KV bytes that moved."""
    ids = prompt(length)
    alone = pair.decode.run(pair.submission(ids, bootstrap=None))
    alone_end = alone.end()
    before = pair.prefill.value("pdcluster_kv_bytes_total", kind="kv")
    leg = pair.submission(ids)
    first, second = pair.prefill.run(leg), pair.decode.run(leg)
    ends = [alone_end, second.end(), first.end()]
    return {
        "ends": [[str(reason), detail] for reason, detail in ends],
        "alone": [(output.token_id, output.logprob) for output in alone.outputs],
        "pair": [(output.token_id, output.logprob) for output in second.outputs],
        "bytes": pair.prefill.value("pdcluster_kv_bytes_total", kind="kv") - before,
        "expected_bytes": length * pair.prefill.bytes_per_token,
    }


class Fencing:
    """Stands in for a transport, and fences it once, on the owner's thread."""

    def __init__(self, inner: InProcessTransport) -> None:
        self.inner = inner
        self._asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def events(self) -> list[TransportEvent]:
        if not self._asked:
            self._asked = True
            self.inner.fence()
        return self.inner.events()


def fence(engine: Running) -> None:
    """End the transport's generation, and wait until the next one serves."""
    port = engine.parts.loop._ports[0]
    inner = port.transport
    assert isinstance(inner, InProcessTransport)
    port.transport = Fencing(inner)
    engine.parts.inbox.wake()
    restarts = "pdcluster_transport_restarts_total"
    until(lambda: engine.value(restarts, cause="fence") == 1)
    until(lambda: engine.parts.engine.state().ready)


def say(**fields: Any) -> None:
    os.write(1, msgspec.json.encode(fields) + b"\n")


if __name__ == "__main__":
    configure_logging()
    run(sys.argv[1], sys.argv[2], sys.argv[3], [int(length) for length in sys.argv[4].split(",")])
    # Leaving without unwinding, as the engine does.
    os._exit(0)
