"""What stands in for model and fabric when only the control plane is measured.

The transport copies through shared memory and is done at once, hashes included; the model knows
every row as soon as its pause is over. Both keep to the ports of the real ones, so node, owner
loop, executor and link do not know the difference.
"""

from __future__ import annotations

import heapq
import mmap
import os
import threading
import time
from collections.abc import Callable

import xxhash

from pdcluster_engine.memory.metadata import MetadataRow, MetadataTable
from pdcluster_engine.scheduling.orders import Begin, Work
from pdcluster_engine.text import TextCodec
from pdcluster_engine.transport.port import (
    Completed,
    DigestRequest,
    Ready,
    Request,
    TransportEvent,
    WriteRequest,
    succeeded,
)
from pdcluster_protocol.events import (
    ComputeStopped,
    DecodeFinished,
    Event,
    PromptComputed,
    RowsWritten,
)
from pdcluster_protocol.ids import Key
from pdcluster_protocol.layout import KVLayout, Region

LAYOUT = KVLayout(64, "bfloat16", tuple(Region(n // 2, "kv"[n % 2], 128) for n in range(4)))
"""Two layers with keys and values, as the SGLang side has them."""
BASE_ADDRESS = 1 << 40
_PREFIX = "instant:"


class InstantTransport:
    """`transport.port.Transport` between two processes that map each other's arena."""

    def __init__(self, arena_fd: int, arena_nbytes: int) -> None:
        self._map = memoryview(mmap.mmap(arena_fd, arena_nbytes))
        self._name = f"{_PREFIX}/proc/{os.getpid()}/fd/{arena_fd}"
        self._peers: dict[str, memoryview] = {}
        self._events: list[TransportEvent] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self) -> None:
        self._tell(Ready(self._name, BASE_ADDRESS, "instant-1", 1))

    def fileno(self) -> int:
        return self._wake

    def submit(self, request: Request) -> None:
        self._tell(self._done(request))

    def events(self) -> list[TransportEvent]:
        if not self._events:
            return []
        os.eventfd_read(self._wake)
        events, self._events = self._events, []
        return events

    def fence(self) -> None:
        """Nobody needs one here: a write that was taken has landed.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a fence, although every write landed at once")

    def close(self) -> None:
        os.close(self._wake)

    def _tell(self, event: TransportEvent) -> None:
        if not self._events:
            os.eventfd_write(self._wake, 1)
        self._events.append(event)

    def _done(self, request: Request) -> Completed:
        match request:
            case WriteRequest():
                self._copy(request)
                return succeeded(request.operation, self._digest(request) if request.digest else 0)
            case DigestRequest():
                return succeeded(request.operation, self._digest(request))

    def _copy(self, request: WriteRequest) -> None:
        # One piece each, since one rank writes whole rows to one rank.
        assert request.pieces == 1
        start, to = request.source_offset, request.destination_address - BASE_ADDRESS
        nbytes = request.nbytes
        self._peer(request.target)[to : to + nbytes] = self._map[start : start + nbytes]

    def _digest(self, request: Request) -> int:
        start, end = next(request.source.ranges())
        return xxhash.xxh3_64_intdigest(self._map[start:end])

    def _peer(self, target: str) -> memoryview:
        found = self._peers.get(target)
        if found is None:
            fd = os.open(target.removeprefix(_PREFIX), os.O_RDWR)
            found = self._peers[target] = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
            os.close(fd)
        return found


class NullRunner:
    """Has no weights; `NullCompute` never calls a forward."""

    max_context = 1 << 16

    def attach(self, *_arenas: object) -> None:
        """There is nothing to view them as."""


class NullModel:
    """In the place of a `LoadedModel`."""

    def __init__(self, tokenizer: TextCodec) -> None:
        self.runner = NullRunner()
        self.tokenizer = tokenizer
        self.layout = LAYOUT


class Times:
    """When what happened to a room, in monotonic nanoseconds."""

    __slots__ = ("begun", "computed")

    def __init__(self) -> None:
        self.begun = 0
        self.computed = 0


class NullCompute:
    """In the place of `ModelThread`, made with the same arguments.

    A prompt is computed when its room's pause is over, at once without one. An answer ends at once.
    """

    queued = 0
    active = 0

    def __init__(
        self,
        _runner: object,
        _codec: object,
        *,
        metadata: MetadataTable,
        post: Callable[[Event], None],
        **_others: object,
    ) -> None:
        self.pauses: dict[int, int] = {}
        """Of rooms, in nanoseconds."""
        self.times: dict[int, Times] = {}
        self._metadata = metadata
        self._post = post
        self._due: list[tuple[int, int, Begin]] = []
        self._count = 0
        self._changed = threading.Condition()

    def begin(self, order: Begin) -> bool:
        times = self.times[order.key.room]
        times.begun = time.monotonic_ns()
        if order.work is not Work.PREFILL:
            self._post(DecodeFinished(order.key))
            return True
        pause = self.pauses.pop(order.key.room)
        if not pause:
            self._compute(order)
            return True
        with self._changed:
            self._count += 1
            entry = (times.begun + pause, self._count, order)
            heapq.heappush(self._due, entry)
            if self._due[0] is entry:
                self._changed.notify()
        return True

    def stop(self, key: Key) -> None:
        self._post(ComputeStopped(key))

    def run(self) -> None:
        """The pauses' clock, for as long as the process lives."""
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic_ns():
                    self._changed.wait(self._seconds_left())
                _, _, order = heapq.heappop(self._due)
            self._compute(order)

    def _seconds_left(self) -> float | None:
        return max(0.0, (self._due[0][0] - time.monotonic_ns()) / 1e9) if self._due else None

    def _compute(self, order: Begin) -> None:
        key, slot = order.key, order.slot
        assert slot is not None
        self.times[key.room].computed = time.monotonic_ns()
        tokens = len(order.leg.submission.token_ids)
        for region in range(len(LAYOUT.regions)):
            self._post(RowsWritten(key, region, 0, tokens))
        self._metadata.write(slot, MetadataRow(token=1, room=key.room))
        self._post(PromptComputed(key))


def open_instantly(
    _kind: str, *, arena_fd: int, arena_nbytes: int, **_others: object
) -> InstantTransport:
    """In the place of `open_transport`."""
    return InstantTransport(arena_fd, arena_nbytes)
