"""A transport that lies: it wraps another one and injects seeded faults into its writes.

Which write gets which fault depends on the plan's seed and the order of submission only; the faults
are those of `fault_plan.Fault`. Digest requests are never touched, so the one who verifies is
honest. `Died` and `Fenced` of the inner transport end what is held back as well: a fence is a fence
here too.

One lie is missing on purpose: a write that was answered `ok`, landed, and lands again at some later
time. Whoever has verified the bytes by then reads them, and no control plane can know. The port
says that `ok` is the last byte (see `port.Completed`), and this is what it is relied on for.
"""

from __future__ import annotations

import mmap
import random
import select
import time
from collections.abc import Callable
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
from pdcluster_protocol.fault_plan import Fault, FaultPlan

HIDDEN_BASE = 1 << 62
"""Operations of our own start here; the owner's numbers must stay below."""


class Injected(NamedTuple):
    """A fault that was injected."""

    operation: int
    fault: Fault


class _Held(NamedTuple):
    at: float
    """On the monotonic clock."""
    what: Completed | WriteRequest


class _Lie(NamedTuple):
    fault: Fault
    request: WriteRequest


class FaultyTransport:
    """`port.Transport` around another one; it owns the inner transport from now on."""

    def __init__(
        self,
        inner: Transport,
        plan: FaultPlan,
        *,
        arena_fd: int,
        arena_nbytes: int,
        told: Callable[[Injected], None] = lambda _: None,
        renewed: Callable[[], FaultPlan | None] = lambda: None,
    ) -> None:
        """`arena_fd` is the inner transport's arena, and only read.

        `told` hears of every fault; `renewed` is asked before every write for a new plan.
        """
        self._inner = inner
        self._told = told
        self._renewed = renewed
        self._map = mmap.mmap(arena_fd, arena_nbytes, prot=mmap.PROT_READ)
        self._epoll = select.epoll()
        self._timer = Timer()
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._lies: dict[int, _Lie] = {}
        """By operation: what is to be said and done when the inner transport has answered."""
        self._held: list[_Held] = []
        self._behind: list[WriteRequest] = []
        """Writes that wait for the next one."""
        self._answers: dict[int, list[Completed]] = {}
        """Answers that wait until a write of our own has landed, by its operation."""
        self._hidden = HIDDEN_BASE
        self._closed = False
        self._follow(plan)

    def start(self) -> None:
        """See `port.Transport`."""
        self._inner.start()

    def fileno(self) -> int:
        """See `port.Transport`."""
        return self._epoll.fileno()

    def submit(self, request: Request) -> None:
        """See `port.Transport`."""
        if not isinstance(request, WriteRequest):
            self._inner.submit(request)
            return
        fault = self._choose()
        behind, self._behind = self._behind, []
        if fault is None:
            self._inner.submit(request)
        else:
            self._told(Injected(request.operation, fault))
            self._lie(fault, request)
        for late in behind:
            self._submit_held(late)

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

    def _follow(self, plan: FaultPlan) -> None:
        """Choose by this plan from now on; what is under way keeps its fault."""
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 - a seed must replay, not be secret

    def _choose(self) -> Fault | None:
        plan = self._renewed()
        if plan is not None:
            self._follow(plan)
        throw = self._random.random()
        for fault, share in sorted(self._plan.shares.items()):
            if throw < share:
                return fault
            throw -= share
        return None

    def _lie(self, fault: Fault, request: WriteRequest) -> None:
        """What happens instead of the write."""
        match fault:
            case Fault.DROP:
                pass
            case Fault.EARLY_COMPLETION:
                self._hold(self._praised(request), late=False)
                self._hold(self._hide(request), late=True)
            case Fault.ERROR_THEN_WRITE:
                self._hold(failed(request.operation, "a fault was injected"), late=False)
                self._hold(self._hide(request), late=True)
            case Fault.LATE_WRITE:
                self._hold(request, late=True)
            case Fault.REORDER:
                self._behind.append(request)
                # Should no other write come, this one is only late.
                self._hold(request, late=True)
            case Fault.TRUNCATED_RUN:
                self._lies[request.operation] = _Lie(fault, request)
                self._inner.submit(_first_half(request))
            case Fault.DELAY | Fault.DUPLICATE | Fault.FLIPPED_BYTE:
                self._lies[request.operation] = _Lie(fault, request)
                self._inner.submit(request)

    def _answered(self, event: Completed) -> list[Completed]:
        """The inner transport's answer, or what the owner shall believe instead."""
        if event.operation >= HIDDEN_BASE:
            return self._answers.pop(event.operation, [])
        lie = self._lies.pop(event.operation, None)
        if lie is None or not event.ok:
            return [event]
        match lie.fault:
            case Fault.DELAY:
                self._hold(event, late=True)
            case Fault.DUPLICATE:
                self._write_first(self._hide(lie.request), [event, event])
            case Fault.FLIPPED_BYTE:
                self._write_first(self._wrong_byte(lie.request), [event])
            case Fault.TRUNCATED_RUN:
                return [self._praised(lie.request)]
            case _:
                return [event]
        return []

    def _write_first(self, request: WriteRequest, answers: list[Completed]) -> None:
        """Say `answers` only when a write of our own has landed, so that nothing comes later."""
        self._answers[request.operation] = answers
        self._inner.submit(request)

    def _wrong_byte(self, request: WriteRequest) -> WriteRequest:
        """A write of one byte of the arena that differs from the one that has just landed."""
        position = self._random.randrange(request.source.total_nbytes)
        right = self._map[request.source.place(position)]
        wrong = next((i for i in range(len(self._map)) if self._map[i] != right), None)
        if wrong is None:
            raise ValueError("no byte of the arena differs, so none can be flipped")
        return msgspec.structs.replace(
            self._hide(request),
            source_offset=wrong,
            destination_address=request.destination.place(position),
            nbytes=1,
            pieces=1,
        )

    def _praised(self, request: WriteRequest) -> Completed:
        """The answer that says all of it has landed."""
        digest, source = 0, request.source
        if request.digest:
            with memoryview(self._map) as arena:
                digest = HostWindow(arena).digest(
                    source.offset, source.nbytes, pieces=source.count, stride=source.stride
                )
        return succeeded(request.operation, digest)

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
        for what in due:
            if isinstance(what, WriteRequest):
                self._submit_held(what)
        return [what for what in due if isinstance(what, Completed)]

    def _submit_held(self, request: WriteRequest) -> None:
        self._behind = [other for other in self._behind if other is not request]
        self._held = [held for held in self._held if held.what is not request]
        try:
            self._inner.submit(request)
        except TransportError as error:
            if request.operation < HIDDEN_BASE:
                self._hold(failed(request.operation, error.detail), late=False)

    def _next_at(self) -> float | None:
        return min((held.at for held in self._held), default=None)

    def _forget(self) -> None:
        self._lies.clear()
        self._held.clear()
        self._behind.clear()
        self._answers.clear()


def _first_half(request: WriteRequest) -> WriteRequest:
    """At least one byte less, unless there is only one."""
    if request.pieces > 1:
        return msgspec.structs.replace(request, pieces=request.pieces // 2, digest=False)
    return msgspec.structs.replace(request, nbytes=max(1, request.nbytes // 2), digest=False)
