"""Drives requests through a prefill and a decode process that speak in lines, and takes times.

Both systems get the same rooms, pauses and load in the same run. A client starts its next request
when both sides of the last one have concluded. The *control time* of a request is all its time but
the pause, which stands for forward and transfer.
"""

from __future__ import annotations

import os
import random
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pdcluster_protocol.ids import mint_attempt, mint_room

SEED = 20261201
ANSWER_SECONDS = 30.0
NANOSECONDS = 1_000_000_000


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How much load."""

    name: str
    requests: int
    parallel: int
    pause_seconds: float = 0.0
    """Mean of what stands for forward and transfer; each request draws 0.5 to 1.5 times that."""


class Exchange(msgspec.Struct):
    """One request, in monotonic nanoseconds; 0: not yet."""

    minted: int = 0
    begun: int = 0
    """Prefill knows decode's pages, has its own, and may compute."""
    computed: int = 0
    handed_over: int = 0
    """Decode knows that everything has landed, and may read."""
    prefill_ended: int = 0
    decode_ended: int = 0

    @property
    def admission(self) -> float:
        return (self.begun - self.minted) / NANOSECONDS

    @property
    def hand_over(self) -> float:
        return (self.handed_over - self.computed) / NANOSECONDS

    @property
    def conclusion(self) -> float:
        return (self.ended - self.handed_over) / NANOSECONDS

    @property
    def ended(self) -> int:
        return max(self.prefill_ended, self.decode_ended)

    @property
    def control(self) -> float:
        return self.admission + (self.ended - self.computed) / NANOSECONDS


class System(msgspec.Struct, frozen=True):
    """Two processes to drive, and whose CPU counts, by name."""

    name: str
    prefill: subprocess.Popen[bytes]
    decode: subprocess.Popen[bytes]
    counted: Mapping[str, int]
    polls: bool = False
    """Both processes turn while nothing is asked."""


class Found(msgspec.Struct, frozen=True):
    """What one load gave."""

    exchanges: list[Exchange]
    seconds: float
    cpu_seconds: dict[str, float]

    def of(self, name: str) -> list[float]:
        """One of the times, of every request, in seconds."""
        return [getattr(each, name) for each in self.exchanges]

    def cpu_per_request(self) -> float:
        return sum(self.cpu_seconds.values()) / len(self.exchanges)


def drive(system: System, shape: Shape) -> Found:
    """Send the load and wait for its end.

    Raises:
        TimeoutError: nothing ended for 30 s.
        RuntimeError: a process ended.
    """
    before = {name: cpu_seconds(pid) for name, pid in system.counted.items()}
    started = time.monotonic()
    clients = _Clients(system, shape)
    clients.run()
    seconds = time.monotonic() - started
    used = {name: cpu_seconds(pid) - before[name] for name, pid in system.counted.items()}
    return Found(clients.ended, seconds, used)


def cpu_seconds(pid: int) -> float:
    """CPU of a process, all threads, by the scheduler's own count of nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / NANOSECONDS


class _Clients:
    """`parallel` clients over the pipes of both sides."""

    def __init__(self, system: System, shape: Shape) -> None:
        self._system = system
        self._shape = shape
        self._random = random.Random(SEED)
        self._open: dict[int, Exchange] = {}
        self._unread = {True: b"", False: b""}
        self._started = 0
        self.ended: list[Exchange] = []

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for prefill, process in ((True, self._system.prefill), (False, self._system.decode)):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, prefill)
            # Clients that pause begin one after the other, or all would ask at once for ever.
            gap = self._shape.pause_seconds / self._shape.parallel
            waiting = [time.monotonic() + gap * n for n in range(self._shape.parallel)]
            while len(self.ended) < self._shape.requests:
                while waiting and waiting[0] <= time.monotonic():
                    waiting.pop(0)
                    self._start()
                timeout = max(0.0, waiting[0] - time.monotonic()) if waiting else ANSWER_SECONDS
                ready = selector.select(timeout)
                if not ready and not waiting:
                    raise TimeoutError(f"{self._system.name}: {len(self._open)} requests hang")
                for key, _ in ready:
                    self._read(key.fd, prefill=key.data)

    def _start(self) -> None:
        if self._started == self._shape.requests:
            return
        self._started += 1
        draw = self._random
        room = mint_room(draw.getrandbits(63), dp_size=1, dp_rank=0)
        attempt = mint_attempt(time.time_ns() // 1_000_000, draw.getrandbits(22))
        pause = round(draw.uniform(0.5, 1.5) * self._shape.pause_seconds * NANOSECONDS)
        line = b"%d %d %d\n" % (room, pause, attempt)
        self._open[room] = Exchange(minted=time.monotonic_ns())
        for process in (self._system.prefill, self._system.decode):
            assert process.stdin is not None
            os.write(process.stdin.fileno(), line)

    def _read(self, fd: int, *, prefill: bool) -> None:
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            side = "prefill" if prefill else "decode"
            raise RuntimeError(f"{self._system.name}: the {side} process ended")
        *lines, self._unread[prefill] = (self._unread[prefill] + chunk).split(b"\n")
        for line in lines:
            self._take([int(word) for word in line.split()], prefill=prefill)

    def _take(self, words: Sequence[int], *, prefill: bool) -> None:
        room, first, second, ended = words
        exchange = self._open[room]
        if prefill:
            exchange.begun, exchange.computed, exchange.prefill_ended = first, second, ended
        else:
            exchange.handed_over, exchange.decode_ended = first, ended
        if exchange.prefill_ended and exchange.decode_ended:
            del self._open[room]
            self.ended.append(exchange)
            self._start()
