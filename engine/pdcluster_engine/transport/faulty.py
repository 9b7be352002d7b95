"""A transport that lies: it wraps another one and injects seeded faults into its writes.

Which write gets which fault depends on the seed and the order of submission only. The faults:

    Drop             the write is not sent and never answered
    Delay            the answer is held back
    Reorder          the answer is held until the next write's answer has been told
    EarlyCompletion  the answer says ok before the write is sent
    LateWrite        the source is sent a second time after its answer, whatever it holds by then
    FlippedByte      the answer is ok with the right digest, but one landed byte is wrong
    ErrorThenWrite   the answer says failed, and then the write is sent

`Died` and `Fenced` of the inner transport end what is held back as well: a fence is a fence here
too. Digest requests are never touched.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import select
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.transport.linux import Timer
from pdcluster_engine.transport.port import (
    Completed,
    Died,
    Fenced,
    Ready,
    Request,
    Transport,
    TransportEvent,
    WriteRequest,
    failed,
    succeeded,
)
from pdcluster_protocol.errors import TransportError

HIDDEN_BASE = 1 << 62
"""Operations of our own start here; the owner's numbers must stay below."""


class Fault(StrEnum):
    """See the module."""

    DROP = "Drop"
    DELAY = "Delay"
    REORDER = "Reorder"
    EARLY_COMPLETION = "EarlyCompletion"
    LATE_WRITE = "LateWrite"
    FLIPPED_BYTE = "FlippedByte"
    ERROR_THEN_WRITE = "ErrorThenWrite"


class FaultPlan(msgspec.Struct, frozen=True):
    """How often each fault happens to a write; the shares add up to 1 at most."""

    seed: int
    shares: Mapping[Fault, float]
    late_seconds: float = 0.05
    """How long what is late is late."""

    def __post_init__(self) -> None:
        total = sum(self.shares.values())
        if not 0 <= total <= 1:
            raise ValueError(f"shares of faults add up to {total}; at most 1")


class Injected(NamedTuple):
    """A fault that was injected."""

    operation: int
    fault: Fault


class _Held(NamedTuple):
    at: float
    """On the monotonic clock."""
    what: Completed | WriteRequest


class FaultyTransport:
    """`port.Transport` around another one; it owns the inner transport from now on."""

    def __init__(
        self, inner: Transport, plan: FaultPlan, *, arena_fd: int, arena_nbytes: int
    ) -> None:
        """`arena_fd` is the inner transport's arena; it is only read."""
        self._inner = inner
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 - a seed must replay, not be secret
        self._map = mmap.mmap(arena_fd, arena_nbytes, prot=mmap.PROT_READ)
        self._epoll = select.epoll()
        self._timer = Timer()
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._faults: dict[int, tuple[Fault, WriteRequest]] = {}
        self._held: list[_Held] = []
        self._behind: list[Completed] = []
        """Answers that wait for the next one."""
        self._flips: dict[int, Completed] = {}
        """Answers that wait until our wrong byte has landed, by the operation that writes it."""
        self._hidden = HIDDEN_BASE
        self._closed = False
        self.injected: list[Injected] = []
        """Every fault so far, in order of submission."""

    def start(self) -> None:
        """See `port.Transport`."""
        self._inner.start()

    def fileno(self) -> int:
        """See `port.Transport`."""
        return self._epoll.fileno()

    def submit(self, request: Request) -> None:
        """See `port.Transport`."""
        fault = self._choose() if isinstance(request, WriteRequest) else None
        if fault is None or not isinstance(request, WriteRequest):
            self._inner.submit(request)
            return
        self.injected.append(Injected(request.operation, fault))
        match fault:
            case Fault.DROP:
                pass
            case Fault.EARLY_COMPLETION:
                digest = self._digest(request) if request.digest else 0
                self._hold(succeeded(request.operation, digest), late=False)
                self._hold(self._hide(request), late=True)
            case Fault.ERROR_THEN_WRITE:
                self._hold(failed(request.operation, "a fault was injected"), late=False)
                self._hold(self._hide(request), late=True)
            case Fault.DELAY | Fault.REORDER | Fault.LATE_WRITE | Fault.FLIPPED_BYTE:
                self._faults[request.operation] = (fault, request)
                self._inner.submit(request)

    def fence(self) -> None:
        """See `port.Transport`."""
        self._inner.fence()

    def events(self) -> list[TransportEvent]:
        """See `port.Transport`."""
        if self._closed:
            return []
        self._timer.clear()
        out: list[TransportEvent] = []
        for event in self._inner.events():
            match event:
                case Completed():
                    out += self._answered(event)
                case Died() | Fenced():
                    self._forget()
                    out.append(event)
                case Ready():
                    out.append(event)
        out += self._due()
        self._timer.arm(self._next_at())
        return out

    def close(self) -> None:
        """See `port.Transport`."""
        if self._closed:
            return
        self._closed = True
        self._inner.close()
        self._timer.close()
        self._epoll.close()
        self._map.close()

    def _choose(self) -> Fault | None:
        throw = self._random.random()
        for fault, share in sorted(self._plan.shares.items()):
            if throw < share:
                return fault
            throw -= share
        return None

    def _answered(self, event: Completed) -> list[Completed]:
        """The inner transport's answer, or what the owner shall believe instead."""
        if event.operation >= HIDDEN_BASE:
            waiting = self._flips.pop(event.operation, None)
            return [] if waiting is None else [waiting]
        fault, request = self._faults.pop(event.operation, (None, None))
        behind = self._behind
        self._behind = []
        self._held = [held for held in self._held if held.what not in behind]
        match fault:
            case Fault.REORDER:
                self._behind = [event]
                # Should no other answer come, this one is only late.
                self._hold(event, late=True)
                return behind
            case Fault.DELAY:
                self._hold(event, late=True)
                return behind
            case Fault.LATE_WRITE if request is not None:
                self._hold(self._hide(request), late=True)
            case Fault.FLIPPED_BYTE if request is not None and event.ok:
                self._flip(request, event)
                return behind
            case _:
                pass
        return [event, *behind]

    def _flip(self, request: WriteRequest, answer: Completed) -> None:
        """Overwrite one landed byte by a byte of the arena that differs from it."""
        position = self._random.randrange(request.source.total_nbytes)
        right = self._map[request.source.place(position)]
        wrong = next((i for i in range(len(self._map)) if self._map[i] != right), None)
        if wrong is None:
            raise ValueError("no byte of the arena differs, so none can be flipped")
        byte = msgspec.structs.replace(
            self._hide(request),
            source_offset=wrong,
            destination_address=request.destination.place(position),
            nbytes=1,
            pieces=1,
        )
        self._flips[byte.operation] = answer
        self._inner.submit(byte)

    def _hide(self, request: WriteRequest) -> WriteRequest:
        self._hidden += 1
        return msgspec.structs.replace(request, operation=self._hidden, digest=False)

    def _hold(self, what: Completed | WriteRequest, *, late: bool) -> None:
        at = time.monotonic() + (self._plan.late_seconds if late else 0.0)
        self._held.append(_Held(at, what))
        self._timer.arm(self._next_at())

    def _due(self) -> list[Completed]:
        now = time.monotonic()
        due = [held.what for held in self._held if held.at <= now]
        self._held = [held for held in self._held if held.at > now]
        answers: list[Completed] = []
        for what in due:
            match what:
                case WriteRequest():
                    # A transport that has ended takes no late write, which is right.
                    with contextlib.suppress(TransportError):
                        self._inner.submit(what)
                case Completed():
                    answers.append(what)
        self._behind = [event for event in self._behind if event not in answers]
        return answers

    def _next_at(self) -> float | None:
        return min((held.at for held in self._held), default=None)

    def _forget(self) -> None:
        self._faults.clear()
        self._held.clear()
        self._behind.clear()
        self._flips.clear()

    def _digest(self, request: WriteRequest) -> int:
        source = request.source
        with memoryview(self._map) as arena:
            return HostWindow(arena).digest(
                source.offset, source.nbytes, pieces=source.count, stride=source.stride
            )
