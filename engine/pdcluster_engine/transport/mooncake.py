"""The adapter around Mooncake's `TransferEngine`, inside a transfer process or a thread of its own.

The library returns -1 for everything, crashes when its calls come in the wrong order, and goes on
moving bytes after it has reported an error for a batch. So this adapter

* uses single-entry asynchronous writes, one for each piece of an operation and several for a long
  one, and asks for each id until its end, never again after it (a finished id is freed memory);
* keeps few writes in flight, since a queue overflow makes a peer unreachable for ever;
* has its own deadlines, shorter than the library's, and answers an expired one by raising
  `CannotContinue`: whoever runs it ends its process, which is the only thing that certainly stops
  the writing, or at least destroys the library's engine (`destroy`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from enum import Enum, auto
from typing import Any

import msgspec

from pdcluster_engine.transport.contact import Alarm, ContactGuard
from pdcluster_engine.transport.flights import (
    SMALL_SHARE,
    Flight,
    Peer,
    Writing,
    failure,
    share,
    stall,
)
from pdcluster_engine.transport.install import FabricProtocol, check_machine, explain_import
from pdcluster_engine.transport.port import (
    Completed,
    Deadlines,
    WriteRequest,
    failed,
)
from pdcluster_engine.transport.requests import refusal, source_problem
from pdcluster_engine.transport.wedge import WedgeWatch
from pdcluster_protocol.errors import ConfigError, TransportError

ENVIRONMENT = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    # A peer has four connections, and what waits behind a hung write on one of them waits again:
    # a full window takes four times as long to fail, which our own deadlines must outlast.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    # Far above our own deadlines: the library must not give up an operation that it still sends.
    "MC_TRANSFER_TIMEOUT": "86400",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "1",
    "MC_LOG_LEVEL": "ERROR",
}
FORBIDDEN_ENVIRONMENT = (
    "MC_TCP_PROTO",
    "MC_TCP_ENABLE_CONNECTION_POOL",
    "MC_FORCE_TCP",
    "MC_FORCE_HCA",
    "MC_USE_IPV6",
)


class CannotContinue(TransportError):
    """The library's state is unknown; only the end of its engine makes memory safe again."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the adapter needs to know; it travels to the transfer process in its arguments."""

    host: str
    port_min: int
    port_max: int
    protocol: FabricProtocol = "tcp"
    device: str = ""
    """RDMA adapters to use, separated by commas; empty lets the library choose."""
    window_per_peer: int = 16
    """Large writes in flight; of those up to 16 KiB four times as many."""
    window: int = 64
    deadlines: Deadlines = Deadlines()


class State(Enum):
    """Calls are legal in `STARTED` only; before it the library would crash the process."""

    NEW = auto()
    STARTED = auto()
    BROKEN = auto()


class MooncakeAdapter:
    """`start` once, then `submit` and `poll`; not thread-safe, and needs no thread."""

    __slots__ = (
        "_arena_address",
        "_arena_nbytes",
        "_busy_window",
        "_engine",
        "_guard",
        "_hurry",
        "_operations",
        "_peers",
        "_refused",
        "_registered",
        "_settings",
        "_state",
        "_turn",
        "_wedge",
        "_window",
    )

    def __init__(
        self,
        settings: Settings,
        *,
        arena_address: int,
        arena_nbytes: int,
        guard: ContactGuard | None = None,
    ) -> None:
        """`guard` bounds the calls that may block; without one an alarm ends the process."""
        self._settings = settings
        self._guard = Alarm(settings.deadlines.contact_seconds) if guard is None else guard
        self._registered = False
        self._arena_address = arena_address
        self._arena_nbytes = arena_nbytes
        self._state = State.NEW
        self._engine: Any = None
        self._peers: dict[str, Peer] = {}
        self._window = settings.window * SMALL_SHARE
        """What may still be handed over to all peers, in shares of a large write."""
        self._hurry = False
        self._busy_window = self._window - settings.window_per_peer * SMALL_SHARE // 2
        self._operations = 0
        """Taken and not refused, and not yet ended."""
        self._turn: deque[str] = deque()
        """Peers with queued operations; the first one is served next."""
        self._refused: list[Completed] = []
        self._wedge = WedgeWatch()

    @property
    def outstanding(self) -> int:
        """Operations that have not been reported by `poll`."""
        return self._operations + len(self._refused)

    @property
    def hurry(self) -> bool:
        """Whether most of what flew to a peer had ended when `poll` looked: look sooner."""
        return self._hurry

    @property
    def busy(self) -> bool:
        """Whether at least half of what may fly to one peer is in flight."""
        return self._window <= self._busy_window

    def start(self) -> tuple[str, str]:
        """Import the library, listen, register the arena; return session name and version.

        Raises:
            ConfigError: the machine or the installation cannot do what is asked.
            TransportError: the library refused, for instance because no port is free.
        """
        if self._state is not State.NEW:
            raise TransportError(f"start of a Mooncake adapter that is {self._state.name}")
        self._state = State.BROKEN
        version = check_machine(self._settings.protocol)
        self._engine = self._load()
        host = self._settings.host
        if self._engine.initialize(
            host, "P2PHANDSHAKE", self._settings.protocol, self._settings.device
        ):
            raise TransportError(
                f"Mooncake could not listen on {host} in ports {self._settings.port_min} to "
                f"{self._settings.port_max}; free two of them or widen the range"
            )
        code = self._engine.register_memory(self._arena_address, self._arena_nbytes)
        if code:
            raise TransportError(
                f"Mooncake register_memory of {self._arena_nbytes} bytes failed with {code}"
            )
        self._registered = True
        self._state = State.STARTED
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{self._engine.get_rpc_port()}", version

    def destroy(self) -> None:
        """End the library's engine, with its connections and everything under way on them.

        It takes about a second, in which no Python thread of this process runs. The code of
        unregistering is not asked: on TCP it stops nothing, the destruction does.
        """
        engine, self._engine, self._state = self._engine, None, State.BROKEN
        if engine is not None and self._registered:
            self._registered = False
            engine.unregister_memory(self._arena_address)
        del engine

    def submit(self, request: WriteRequest) -> None:
        """Check and queue one write; a bad one is answered by the next `poll`."""
        self._must_be_started()
        problem = self._problem(request)
        if problem:
            self._refused.append(failed(request.operation, problem))
            return
        peer = self._peers.get(request.target)
        if peer is None:
            peer = self._peers[request.target] = Peer(self._settings.window_per_peer * SMALL_SHARE)
        if not peer.queued:
            self._turn.append(request.target)
        # A network adapter cuts for itself.
        peer.queued.append(Writing(request, cut=self._settings.protocol == "tcp"))
        self._operations += 1

    def poll(self) -> list[Completed]:
        """Start what the windows allow, and report every operation that ended.

        Raises:
            CannotContinue: a deadline expired, a peer is wedged, or the library lost track.
        """
        self._must_be_started()
        ended = self._refused
        self._refused = []
        self._hurry = False
        for target in list(self._peers):
            ended += self._ended(target)
        ended += self._start_queued()
        return ended

    def _load(self) -> Any:  # noqa: ANN401 - the library has no types
        """Import the library with its environment in place, which it reads only once."""
        for name in FORBIDDEN_ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(ENVIRONMENT)
        os.environ["MC_MIN_RPC_PORT"] = str(self._settings.port_min)
        os.environ["MC_MAX_RPC_PORT"] = str(self._settings.port_max)
        os.environ["MC_FORCE_TCP" if self._settings.protocol == "tcp" else "MC_FORCE_HCA"] = "1"
        if ":" in self._settings.host:
            os.environ["MC_USE_IPV6"] = "1"
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(explain_import(error)) from error
        return TransferEngine()

    def _must_be_started(self) -> None:
        if self._state is not State.STARTED:
            raise TransportError(f"a Mooncake adapter that is {self._state.name} was used")

    def _problem(self, request: WriteRequest) -> str:
        """Why a write must not reach the library, or an empty string."""
        problem = source_problem(request.source, arena_nbytes=self._arena_nbytes)
        if problem:
            return f"it {problem}"
        refused = refusal(request)
        if refused is not None:
            return refused.detail
        host, _, port = request.target.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            return f"target {request.target[:80]!r} is not host:port"
        return ""

    def _start_queued(self) -> list[Completed]:
        """Give each peer one turn after the other until the windows are full."""
        ended: list[Completed] = []
        full: list[str] = []
        while self._turn and self._window > 0:
            target = self._turn.popleft()
            peer = self._peers[target]
            if peer.window <= 0:
                full.append(target)
                continue
            writing = peer.queued[0]
            with self._guard(target):
                self._hand_over(target, peer, writing)
            if writing.handed_over or peer.failing:
                peer.queued.popleft()
            if writing.handed_over and not writing.flying:
                ended.append(self._end(writing))
            if peer.queued:
                self._turn.append(target)
        self._turn.extendleft(reversed(full))
        return ended

    def _hand_over(self, target: str, peer: Peer, writing: Writing) -> None:
        """Hand over the writes of one operation, as many as the windows allow."""
        write = self._engine.batch_transfer_async_write
        while not writing.handed_over and self._window > 0 and peer.window > 0:
            started = time.monotonic()
            source, destination, nbytes = writing.next_write()
            batch = write(target, [self._arena_address + source], [destination], [nbytes])
            if not batch:
                writing.failure = failure(writing.request, time.monotonic() - started)
                peer.failing = True
                return
            writing.flying += 1
            self._count(peer, nbytes)
            deadline = started + self._settings.deadlines.stall_seconds(peer.flying_bytes)
            peer.flights.append(Flight(writing, batch, nbytes, started, deadline))
            if peer.failing:
                return

    def _count(self, peer: Peer, nbytes: int, *, back: bool = False) -> None:
        """Take one write out of the windows, or give it back."""
        sign = -1 if back else 1
        taken = sign * share(nbytes)
        peer.window -= taken
        self._window -= taken
        peer.flying_bytes += sign * nbytes

    def _ended(self, target: str) -> list[Completed]:
        """Ask for every flight of one peer and forget those that ended."""
        peer = self._peers[target]
        if not peer.flights and not peer.queued:
            del self._peers[target]
            return []
        now = time.monotonic()
        ask = self._engine.transfer_check_status
        still: list[Flight] = []
        over: list[tuple[Flight, bool]] = []
        for flight in peer.flights:
            match ask(flight.batch):
                case 1:
                    over.append((flight, True))
                case -1:
                    over.append((flight, False))
                case 0 if now < flight.deadline:
                    still.append(flight)
                case status:
                    self._state = State.BROKEN
                    raise CannotContinue(stall(flight, status, now))
        self._hurry = self._hurry or len(over) > len(still)
        peer.flights = still
        return [
            self._end(flight.writing)
            for flight, ok in over
            if self._over(target, peer, flight, failed_at=None if ok else now)
        ]

    def _over(self, target: str, peer: Peer, flight: Flight, *, failed_at: float | None) -> bool:
        """Take note of the end of one write; whether its operation ends with it."""
        writing = flight.writing
        self._count(peer, flight.nbytes, back=True)
        writing.flying -= 1
        peer.failing = failed_at is not None
        if failed_at is not None:
            self._failed(target, peer, flight, failed_at)
        else:
            self._wedge.landed(target)
            if not writing.handed_over and writing not in peer.queued:
                peer.queued.appendleft(writing)
                if len(peer.queued) == 1:
                    self._turn.append(target)
        return writing.handed_over and not writing.flying

    def _failed(self, target: str, peer: Peer, flight: Flight, failed_at: float) -> None:
        """Hand over no more of the operation of a write that failed."""
        writing = flight.writing
        if not writing.failure:
            writing.failure = failure(writing.request, failed_at - flight.started)
        if writing in peer.queued:
            peer.queued.remove(writing)
            if not peer.queued:
                self._turn.remove(target)
        if self._wedge.failed(target, started=flight.started, ended=failed_at):
            self._state = State.BROKEN
            raise CannotContinue(f"Mooncake is wedged for {target}: each write fails after 1.00 s")

    def _end(self, writing: Writing) -> Completed:
        self._operations -= 1
        return writing.end
