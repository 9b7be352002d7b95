"""The transfer process: `python -m pdcluster_engine.transport.process SETTINGS`.

It owns the only mapping of the arena through which peers write, so `kill -9` of it is the fence.
It has one thread of its own: it blocks on the control socket when nothing is under way, and looks
at the library every 50 to 200 microseconds when something is (1 ms once nothing has ended for a
second). Sources are hashed while their writes fly, between two looks. It ends itself rather than
guess: when a deadline expires, when the engine is gone, and on anything it does not understand.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Protocol

import msgspec

from pdcluster_engine.memory.window import ByteWindow, HostWindow
from pdcluster_engine.transport.channel import Channel, ChannelClosed
from pdcluster_engine.transport.linux import die_with_parent, map_shared, view
from pdcluster_engine.transport.mooncake import MooncakeAdapter, Settings
from pdcluster_engine.transport.port import (
    DETAIL_CHARS_MAX,
    Completed,
    DigestRequest,
    Request,
    WriteRequest,
    succeeded,
)
from pdcluster_protocol.errors import ConfigError, PDClusterError

IDLE_SECONDS = 60.0
PAUSE_SECONDS_MIN = 50e-6
PAUSE_SECONDS_MAX = 200e-6
PAUSE_SECONDS_QUIET = 1e-3
QUIET_SECONDS = 1.0
DIGEST_BYTES_A_TURN = 1 << 20
"""So much is hashed at least between two looks; one request may be longer."""
FAREWELL_SECONDS = 0.5
EXIT_FAREWELL = 3


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of the process, as JSON; it holds numbers and addresses, no secret."""

    control_fd: int
    arena_fd: int
    arena_nbytes: int
    arena_address: int
    """Where to map the arena; no two generations of one engine share an address."""
    parent_pid: int
    adapter: Settings


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First message of the process: peers can write to it."""

    session_name: str
    base_address: int
    version: str


class Farewell(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Last message of a process that ends itself."""

    detail: str
    final: bool
    """Starting again cannot help."""


FromProcess = Started | Completed | Farewell


class Adapter(Protocol):
    """What moves the bytes inside this process."""

    @property
    def outstanding(self) -> int:
        """Operations that `poll` has not reported."""

    def submit(self, request: WriteRequest) -> None:
        """Take one write."""

    @property
    def hurry(self) -> bool:
        """Whether the next look should come soon."""

    @property
    def busy(self) -> bool:
        """Whether enough is under way that a new request may wait for the next look."""

    def poll(self) -> list[Completed]:
        """Go on with all of them and report those that ended."""


class Owed:
    """A digest that was not told yet: of a write, or of its own."""

    __slots__ = ("digest", "landed", "needed", "request")

    def __init__(self, request: Request, *, landed: bool) -> None:
        self.request = request
        self.landed = landed
        """Nothing but the digest is missing."""
        self.digest: int | None = None
        self.needed = True


class Worker:
    """The loop between the control socket, the adapter and the hash."""

    __slots__ = ("_adapter", "_channel", "_hashes", "_owed", "_progress_at", "_window")

    def __init__(self, channel: Channel[Request], adapter: Adapter, window: ByteWindow) -> None:
        self._channel = channel
        self._adapter = adapter
        self._window = window
        self._hashes: deque[Owed] = deque()
        self._owed: dict[int, Owed] = {}
        """Per write that asked for it, its digest."""
        self._progress_at = time.monotonic()

    def serve(self) -> None:
        """Run until the engine closes the control socket.

        Raises:
            ChannelClosed: the engine is gone.
            CannotContinue: only the end of this process makes memory safe.
        """
        pause = PAUSE_SECONDS_MIN
        while True:
            self._take(self._pause_seconds(pause))
            ended = [told for one in self._adapter.poll() if (told := self._landed(one))]
            ended += self._hash_some()
            if ended:
                self._progress_at = time.monotonic()
                self._channel.send(ended)
            hurry = self._adapter.hurry or not self._adapter.outstanding
            pause = PAUSE_SECONDS_MIN if hurry else min(2 * pause, PAUSE_SECONDS_MAX)

    def _pause_seconds(self, pause: float) -> float:
        if self._hashes:
            return 0.0
        if not self._adapter.outstanding:
            return IDLE_SECONDS
        quiet = time.monotonic() - self._progress_at > QUIET_SECONDS
        return PAUSE_SECONDS_QUIET if quiet else pause

    def _readable(self, seconds: float) -> bool:
        """Wait for at most `seconds`, send what could not be sent, and say if requests came."""
        if self._adapter.busy and 0 < seconds <= PAUSE_SECONDS_MAX:
            # Being woken by each request would cost both processes a turn, and could not start it
            # any sooner where the window is full.
            time.sleep(seconds)
            seconds = 0.0
        writers = [self._channel] if self._channel.unsent_bytes else []
        readable, writable, _ = select.select([self._channel], writers, [], seconds)
        if writable:
            self._channel.flush()
        return bool(readable)

    def _take(self, seconds: float) -> None:
        """Wait for at most `seconds` and hand over every request that came."""
        if not self._readable(seconds):
            return
        if not self._adapter.outstanding:
            self._progress_at = time.monotonic()
        for request in self._channel.receive():
            match request:
                case WriteRequest():
                    self._adapter.submit(request)
                    if request.digest:
                        owed = Owed(request, landed=False)
                        self._owed[request.operation] = owed
                        self._hashes.append(owed)
                case DigestRequest():
                    self._hashes.append(Owed(request, landed=True))

    def _landed(self, completed: Completed) -> Completed | None:
        """What to tell of a write that ended: nothing as long as its digest is missing."""
        owed = self._owed.get(completed.operation)
        if owed is None:
            return completed
        if completed.ok and owed.digest is None:
            owed.landed = True
            return None
        del self._owed[completed.operation]
        owed.needed = False
        return succeeded(completed.operation, owed.digest or 0) if completed.ok else completed

    def _hash_some(self) -> list[Completed]:
        """Hash for one turn; what it completes."""
        ended: list[Completed] = []
        hashed_bytes = 0
        while self._hashes and hashed_bytes < DIGEST_BYTES_A_TURN:
            owed = self._hashes.popleft()
            if not owed.needed:
                continue
            source = owed.request.source
            owed.digest = self._window.digest(
                source.offset, source.nbytes, pieces=source.count, stride=source.stride
            )
            hashed_bytes += source.total_nbytes
            if owed.landed:
                self._owed.pop(owed.request.operation, None)
                ended.append(succeeded(owed.request.operation, owed.digest))
        return ended


def run(settings: ProcessSettings, channel: Channel[Request]) -> None:
    """Map and register the arena, say `Started`, and serve."""
    address = map_shared(settings.arena_fd, settings.arena_nbytes, address=settings.arena_address)
    os.close(settings.arena_fd)
    adapter = MooncakeAdapter(
        settings.adapter, arena_address=address, arena_nbytes=settings.arena_nbytes
    )
    session_name, version = adapter.start()
    channel.send([Started(session_name, address, version)])
    window = HostWindow(view(address, settings.arena_nbytes))
    Worker(channel, adapter, window).serve()


def say_farewell(channel: Channel[Request], detail: str, *, final: bool) -> None:
    """Tell the engine why this process ends, for as long as it takes half a second."""
    channel.send([Farewell(detail[:DETAIL_CHARS_MAX], final)])
    until = time.monotonic() + FAREWELL_SECONDS
    while channel.unsent_bytes and time.monotonic() < until:
        select.select([], [channel], [], FAREWELL_SECONDS)
        channel.flush()


def main(argument: str) -> None:
    """Run until told to end, and leave without unwinding: unwinding the library takes a second."""
    settings = msgspec.json.decode(argument, type=ProcessSettings)
    die_with_parent(settings.parent_pid)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # A full pipe must make the library lose log lines, not stop its threads.
    os.set_blocking(sys.stderr.fileno(), False)
    channel: Channel[Request] = Channel(_low_socket(settings.control_fd), Request)
    code = EXIT_FAREWELL
    try:
        run(settings, channel)
    except ChannelClosed:
        code = 0
    except ConfigError as error:
        say_farewell(channel, error.detail, final=True)
    except PDClusterError as error:
        say_farewell(channel, error.detail, final=False)
    except OSError as error:
        say_farewell(channel, f"{type(error).__name__}: {error}", final=False)
    sys.stderr.flush()
    os._exit(code)


def _low_socket(fd: int) -> socket.socket:
    """The control socket under a small number, since `select` takes none above 1,023."""
    low = os.dup(fd)
    os.close(fd)
    return socket.socket(fileno=low)


if __name__ == "__main__":
    main(sys.argv[1])
