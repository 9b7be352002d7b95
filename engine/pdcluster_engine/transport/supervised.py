"""The transport over a transfer process: one epoll for its socket, its stderr, its end and a timer.

The same machine runs a transfer *thread* where a process cannot have the memory (`inprocess`); the
words below say process for both.

    NEW ──start──► STARTING ──Started──► READY
                     │  ▲                  │
          ended/late │  │ retry        end │  fence (from STARTING and READY)
                     ▼  │                  ▼
                   WAITING ◄──Died──── ENDING ──asked: Fenced──► STARTING
                     │
                     └─ final ─► FAILED                 close, from anywhere ─► CLOSED

`ENDING` is the wait for the kernel: `Died` and `Fenced` are said only after the process was
reaped, when its mapping of the arena no longer exists. A thread's end can fail to come; then `Died`
is final and is no fence: the engine's process must end, which is one.
"""

from __future__ import annotations

import functools
import select
import time
from enum import Enum, auto

from pdcluster_engine.transport.addresses import AddressPlan
from pdcluster_engine.transport.channel import ChannelClosed
from pdcluster_engine.transport.child import Child
from pdcluster_engine.transport.life import BeginLife, Life
from pdcluster_engine.transport.linux import Timer
from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import (
    DETAIL_CHARS_MAX,
    OPERATIONS_MAX,
    Completed,
    Died,
    Fenced,
    Ready,
    Request,
    TransportEvent,
    failed,
)
from pdcluster_engine.transport.process import Farewell, FromProcess, Started
from pdcluster_engine.transport.requests import Outstanding, refusal
from pdcluster_protocol.errors import TransportError

RETRY_SECONDS_MIN = 0.1
RETRY_SECONDS_MAX = 5.0
STEADY_SECONDS = 1.0
"""A process that was ready for so long is started again at once; a shorter one after a pause."""
GRACE_SECONDS = 2.0
"""What the process's own deadlines get before the engine stops waiting for its answer."""


class State(Enum):
    """See the picture in the module."""

    NEW = auto()
    STARTING = auto()
    READY = auto()
    ENDING = auto()
    WAITING = auto()
    FAILED = auto()
    CLOSED = auto()


class SupervisedTransport:
    """`port.Transport` over a Mooncake transfer process that can be killed and started again."""

    def __init__(
        self,
        settings: Settings,
        *,
        arena_nbytes: int,
        arena_fd: int = -1,
        begin: BeginLife | None = None,
        operations_max: int = OPERATIONS_MAX,
    ) -> None:
        """Use (not own) the memfd `arena_fd`, or whatever `begin` uses; `start` starts it."""
        self._settings = settings
        self._begin: BeginLife = begin or functools.partial(
            _spawn, settings, arena_fd, arena_nbytes
        )
        self._addresses = AddressPlan(arena_nbytes)
        self._outstanding = Outstanding(arena_nbytes, operations_max=operations_max)
        self._held: list[Request] = []
        """Submitted before `Ready`; they belong to the generation that becomes ready."""
        self._events: list[TransportEvent] = []
        self._epoll = select.epoll()
        self._timer = Timer()
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._state = State.NEW
        self._child: Life | None = None
        self._watched_unsent = False
        """Whether the epoll waits until the channel takes more."""
        self._generation = 0
        self._fence_asked = False
        self._cause = ""
        self._final = False
        self._failures = 0
        self._since = 0.0
        """When the present state began."""
        self._heard_at = 0.0
        """When the process last answered, or was first asked after an idle time."""

    @property
    def pid(self) -> int | None:
        """The process that moves the bytes, for tables of processes; None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def generation(self) -> int:
        """The number of the latest start."""
        return self._generation

    def start(self) -> None:
        """See `port.Transport`."""
        if self._state is not State.NEW:
            raise TransportError(f"start of a transport that is {self._state.name}")
        self._spawn()

    def fileno(self) -> int:
        """See `port.Transport`."""
        return self._epoll.fileno()

    def submit(self, request: Request) -> None:
        """See `port.Transport`."""
        if self._state in {State.FAILED, State.CLOSED}:
            raise TransportError(f"the transport has ended: {self._cause or 'it was closed'}")
        refused = refusal(request)
        if refused is not None:
            self._events.append(refused)
            self._timer.arm(0.0)
            return
        was_idle = not self._outstanding
        self._outstanding.add(request)
        if self._state is not State.READY or self._child is None:
            self._held.append(request)
            return
        if was_idle:
            self._heard_at = time.monotonic()
            self._arm()
        self._child.channel.send([request])
        self._watch_channel(self._child)

    def fence(self) -> None:
        """See `port.Transport`; a second call before `Fenced` changes nothing."""
        match self._state:
            case State.STARTING | State.READY:
                self._fence_asked = True
                self._end("")
                self._arm()
            case State.ENDING:
                self._fence_asked = True
            case State.WAITING | State.FAILED:
                # No process, so nothing can land: the answer is known, and told by `events`.
                self._events.append(Fenced(self._generation))
                self._outstanding.clear()
                self._held.clear()
                self._timer.arm(0.0)
            case State.NEW:
                raise TransportError("fence of a transport that was never started")
            case State.CLOSED:
                pass

    def events(self) -> list[TransportEvent]:
        """See `port.Transport`."""
        if self._state is State.CLOSED:
            return []
        ready = {fd for fd, _ in self._epoll.poll(0)}
        if self._timer.fileno() in ready:
            self._timer.clear()
        child = self._child
        if child is not None:
            self._listen(child, ready)
            if child.end_fd in ready and child.reaped():
                self._ended(child)
        self._check_clock()
        self._arm()
        events = self._events
        self._events = []
        return events

    def close(self) -> None:
        """See `port.Transport`; waits the few milliseconds until the process is gone."""
        if self._state is State.CLOSED:
            return
        self._enter(State.CLOSED)
        if self._child is not None:
            self._child.close()
            self._child = None
        self._timer.close()
        self._epoll.close()

    def _spawn(self) -> None:
        self._generation += 1
        self._fence_asked = False
        self._cause = ""
        self._final = False
        try:
            child = self._begin(self._addresses.take())
        except OSError as error:
            self._cause = f"the transfer process could not be started: {error}"
            self._say_died()
            self._timer.arm(0.0)
            return
        self._child = child
        self._watched_unsent = False
        for fd in (child.channel.fileno(), child.stderr_fd, child.end_fd):
            self._epoll.register(fd, select.EPOLLIN)
        self._enter(State.STARTING)
        self._arm()

    def _listen(self, child: Life, ready: set[int]) -> None:
        # The log line that explains a failure was written before the failure was reported, so the
        # log is read after the channel.
        messages: list[FromProcess] = []
        closed = ""
        if self._state is not State.ENDING and child.channel.fileno() in ready:
            try:
                messages = child.channel.receive()
            except ChannelClosed as error:
                closed = str(error)
            if self._watched_unsent:
                child.channel.flush()
                self._watch_channel(child)
        log_wanted = child.stderr_fd in ready or closed or any(map(_is_failure, messages))
        if log_wanted and not child.stderr.drain():
            self._forget(child.stderr_fd)
        for message in messages:
            self._hear(child, message)
        if closed:
            self._end(self._cause)

    def _hear(self, child: Life, message: FromProcess) -> None:
        self._heard_at = time.monotonic()
        match message:
            case Started(session_name=name, base_address=base, version=version):
                self._enter(State.READY)
                self._events.append(Ready(name, base, version, self._generation))
                child.channel.send(self._held)
                self._held = []
                self._watch_channel(child)
            case Completed() if self._outstanding.remove(message.operation):
                self._events.append(message if message.ok else _named(message, child))
            case Completed():
                pass
            case Farewell(detail=detail, final=final):
                self._cause = detail
                self._final = final

    def _end(self, cause: str) -> None:
        """Kill the process and stop listening; the rest follows when it is reaped."""
        child = self._child
        if child is None or self._state is State.ENDING:
            return
        self._cause = cause
        if self._state is State.READY and time.monotonic() - self._since >= STEADY_SECONDS:
            self._failures = 0
        self._enter(State.ENDING)
        self._forget(child.channel.fileno())
        child.kill()

    def _ended(self, child: Life) -> None:
        """The process is reaped: say so, and start the next one now or later."""
        self._end(self._cause)
        asked = self._fence_asked
        cause = self._cause or f"the transfer process ended: {child.explain()}"
        for fd in (child.stderr_fd, child.end_fd):
            self._forget(fd)
        child.close()
        self._child = None
        self._held.clear()
        self._outstanding.clear()
        if asked:
            self._failures = 0
            self._events.append(Fenced(self._generation))
            self._spawn()
            return
        self._cause = cause
        self._say_died()

    def _give_up(self, child: Life) -> None:
        """It does not end, so nothing is proven; whoever hears `final` ends this process."""
        for fd in (child.stderr_fd, child.end_fd):
            self._forget(fd)
        child.release()
        self._child = None
        self._held.clear()
        self._outstanding.clear()
        what = f"the transfer did not end within {child.end_seconds} s"
        self._cause = f"{what}: {self._cause}" if self._cause else what
        self._final = True
        self._say_died()

    def _say_died(self) -> None:
        self._failures += 1
        self._events.append(Died(self._cause[:DETAIL_CHARS_MAX], self._generation, self._final))
        self._enter(State.FAILED if self._final else State.WAITING)

    def _check_clock(self) -> None:
        due = self._due_at()
        if due is None or time.monotonic() < due:
            return
        match self._state:
            case State.WAITING:
                self._spawn()
            case State.STARTING:
                self._end(f"not ready after {self._settings.deadlines.start_seconds} s")
            case State.ENDING if self._child is not None:
                self._give_up(self._child)
            case State.READY:
                seconds = time.monotonic() - self._heard_at
                self._end(f"stalled: the transfer process gave no answer for {seconds:.1f} s")
            case _:
                pass

    def _due_at(self) -> float | None:
        """When the present state must be over."""
        deadlines = self._settings.deadlines
        match self._state:
            case State.WAITING:
                exponent = min(self._failures - 2, 10)
                pause = 0.0 if exponent < 0 else RETRY_SECONDS_MIN * 2**exponent
                return self._since + min(pause, RETRY_SECONDS_MAX)
            case State.STARTING:
                return self._since + deadlines.start_seconds
            case State.ENDING if self._child is not None and self._child.end_seconds is not None:
                return self._since + self._child.end_seconds
            case State.READY if self._outstanding:
                nbytes = self._outstanding.nbytes
                return self._heard_at + deadlines.stall_seconds(nbytes) + GRACE_SECONDS
            case _:
                return None

    def _arm(self) -> None:
        due = self._due_at()
        # What was due earlier, and is no longer, costs one turn when the timer fires; setting it
        # anew would cost a system call with every answer.
        if due is not None and (self._timer.at is None or due < self._timer.at):
            self._timer.arm(due)

    def _enter(self, state: State) -> None:
        self._state = state
        self._since = time.monotonic()

    def _watch_channel(self, child: Life) -> None:
        unsent = bool(child.channel.unsent_bytes)
        if unsent != self._watched_unsent:
            self._watched_unsent = unsent
            wanted = select.EPOLLIN | (select.EPOLLOUT if unsent else 0)
            self._epoll.modify(child.channel.fileno(), wanted)

    def _forget(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except (FileNotFoundError, ValueError):
            return


def _spawn(settings: Settings, arena_fd: int, arena_nbytes: int, address: int) -> Life:
    return Child.spawn(settings, arena_fd=arena_fd, nbytes=arena_nbytes, address=address)


def _named(completed: Completed, child: Life) -> Completed:
    cause = child.stderr.cause()
    detail = f"{completed.detail}: {cause}" if cause else completed.detail
    return failed(completed.operation, detail)


def _is_failure(message: FromProcess) -> bool:
    return isinstance(message, Completed) and not message.ok
