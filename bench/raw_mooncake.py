"""Mooncake with nothing around it: the yardstick of the transfer benchmark.

Two processes, each with the library's engine over one shared memory. The writer submits single
writes, keeps a window of them in flight and looks every 50 microseconds: the fastest way of driving
the library from Python that we know (multi-entry and blocking calls spin a core and are slower).
It checks nothing, bounds nothing and hashes nothing.

    python -m bench.raw_mooncake HOST PORT_MIN MEMORY_FD NBYTES

Lines of JSON: the address comes first; `[peer, base, writes, window]` is answered by the seconds it
took, where `writes` are (source offset, destination offset, bytes, pieces, strides).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.kv_geometry import Move
from pdcluster_engine.transport.linux import map_shared
from pdcluster_engine.transport.mooncake import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
PORTS = 32
PAUSE_SECONDS = 50e-6
ADDRESS = 0x2000_0000_0000
END_SECONDS = 10.0


class RawEnd:
    """The benchmark's side of one such process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.session_name, self.base = self._answer()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def move(self, peer: RawEnd, moves: Sequence[Move], window: int) -> float:
        """Have all moves written; the seconds from the first submission to the last end."""
        order = (peer.session_name, peer.base, moves, window)
        assert self._popen.stdin is not None
        self._popen.stdin.write(msgspec.json.encode(order) + b"\n")
        self._popen.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:  # noqa: ANN401 - whatever the process says
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            message = "a process around bare Mooncake has ended"
            raise RuntimeError(message)
        return msgspec.json.decode(line)


@contextlib.contextmanager
def raw_end(host: str, port_min: int, memory_fd: int, nbytes: int) -> Iterator[RawEnd]:
    """Start one process over a memfd, and end it."""
    popen = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bench.raw_mooncake",
            host,
            *map(str, (port_min, memory_fd, nbytes)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(memory_fd,),
        cwd=ROOT,
    )
    try:
        yield RawEnd(popen)
    finally:
        popen.kill()
        popen.communicate(timeout=END_SECONDS)


def write_all(
    engine: Any,  # noqa: ANN401 - the library has no types
    peer: str,
    base: int,
    moves: Sequence[Move],
    window: int,
) -> float:
    """One pass, each piece a write of its own."""
    pieces = iter(
        (
            ADDRESS + move.source + piece * move.source_stride,
            base + move.destination + piece * move.destination_stride,
            move.nbytes,
        )
        for move in moves
        for piece in range(move.pieces)
    )
    submit, ask = engine.batch_transfer_async_write, engine.transfer_check_status
    flying: list[int] = []
    started = time.perf_counter()
    more = True
    while more or flying:
        while more and len(flying) < window:
            piece = next(pieces, None)
            if piece is None:
                more = False
                break
            source, destination, nbytes = piece
            flying.append(submit(peer, [source], [destination], [nbytes]))
        time.sleep(PAUSE_SECONDS)
        asked = [(batch, ask(batch)) for batch in flying]
        if any(status not in {0, 1} for _, status in asked):
            message = f"bare Mooncake could not write to {peer}"
            raise RuntimeError(message)
        flying = [batch for batch, status in asked if status == 0]
    return time.perf_counter() - started


def main(host: str, port_min: int, memory_fd: int, nbytes: int) -> None:
    """Serve orders until the end of standard input."""
    os.environ.update(ENVIRONMENT)
    os.environ["MC_MIN_RPC_PORT"] = str(port_min)
    os.environ["MC_MAX_RPC_PORT"] = str(port_min + PORTS - 1)
    os.environ["MC_FORCE_TCP"] = "1"
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        message = f"bare Mooncake cannot listen on {host} from port {port_min} on"
        raise RuntimeError(message)
    engine.register_memory(map_shared(memory_fd, nbytes, address=ADDRESS), nbytes)
    _say((f"{host}:{engine.get_rpc_port()}", ADDRESS))
    decoder = msgspec.json.Decoder(tuple[str, int, list[Move], int])
    for line in sys.stdin.buffer:
        _say(write_all(engine, *decoder.decode(line)))
    os._exit(0)


def _say(what: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
