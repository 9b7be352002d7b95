"""The twin without a library: streams over abstract unix sockets of one machine, in one thread.

It has the same port and the same honesty as the real one: the receiver of bytes is the only one
who writes into its arena, a fence closes its sockets in the owner's own thread (so nothing can
land afterwards), and bytes that a dead sender left in the kernel do land. All work is done inside
`events`, in bounded turns. A session name is `local:` and the name of an abstract socket, which
leaves no file behind; only processes of the same user are let in.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import time

from pdcluster_engine.memory.pieces import Pieces
from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.transport.addresses import AddressPlan
from pdcluster_engine.transport.linux import Timer
from pdcluster_engine.transport.local_links import IncomingLink, LinkEnded, OutgoingLink
from pdcluster_engine.transport.port import (
    OPERATIONS_MAX,
    Completed,
    Deadlines,
    Died,
    DigestRequest,
    Fenced,
    Ready,
    Request,
    TransportEvent,
    WriteRequest,
    failed,
    succeeded,
)
from pdcluster_engine.transport.requests import Outstanding, refusal
from pdcluster_protocol.errors import TransportError

PREFIX = "local:"
VERSION = "local-1"
BACKLOG = 128
ACCEPTS_A_TURN = 16
LINKS_MAX = 1024
_CREDENTIALS = struct.Struct("3i")


class LocalTransport:
    """`port.Transport` between processes (or within one) of one machine."""

    def __init__(
        self,
        *,
        arena_fd: int,
        arena_nbytes: int,
        deadlines: Deadlines,
        operations_max: int = OPERATIONS_MAX,
    ) -> None:
        """Map the arena; nobody can write to it before `start`."""
        self._map = mmap.mmap(arena_fd, arena_nbytes)
        self._arena = memoryview(self._map)
        self._window = HostWindow(self._arena)
        self._deadlines = deadlines
        self._outstanding = Outstanding(arena_nbytes, operations_max=operations_max)
        self._addresses = AddressPlan(arena_nbytes)
        self._events: list[TransportEvent] = []
        self._held: list[Request] = []
        self._epoll = select.epoll()
        self._timer = Timer()
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._listener: socket.socket | None = None
        self._incoming: dict[int, IncomingLink] = {}
        self._outgoing: dict[str, OutgoingLink] = {}
        self._targets: dict[int, str] = {}
        """Which target an outgoing descriptor belongs to."""
        self._base = 0
        self._generation = 0
        self._closed = False

    @property
    def generation(self) -> int:
        """The number of the latest session."""
        return self._generation

    def start(self) -> None:
        """See `port.Transport`."""
        if self._generation or self._closed:
            raise TransportError("start of a transport that was started before")
        self._open_session()

    def fileno(self) -> int:
        """See `port.Transport`."""
        return self._epoll.fileno()

    def submit(self, request: Request) -> None:
        """See `port.Transport`."""
        if self._closed:
            raise TransportError("the transport was closed")
        refused = refusal(request)
        if refused is not None:
            self._tell(refused)
            return
        self._outstanding.add(request)
        if self._listener is None:
            self._held.append(request)
        else:
            self._begin(request)

    def fence(self) -> None:
        """See `port.Transport`; here it is complete when this returns."""
        if self._closed:
            return
        if not self._generation:
            raise TransportError("fence of a transport that was never started")
        generation = self._end_session()
        self._tell(Fenced(generation))
        self._open_session()

    def events(self) -> list[TransportEvent]:
        """See `port.Transport`."""
        if self._closed:
            return []
        for fd, mask in self._epoll.poll(0):
            self._serve(fd, mask)
        self._check_clock()
        events = self._events
        self._events = []
        self._timer.arm(self._due_at())
        return events

    def close(self) -> None:
        """See `port.Transport`."""
        if self._closed:
            return
        self._end_session()
        self._closed = True
        self._timer.close()
        self._epoll.close()
        self._arena.release()
        self._map.close()

    def _serve(self, fd: int, mask: int) -> None:
        if fd == self._timer.fileno():
            self._timer.clear()
        elif self._listener is not None and fd == self._listener.fileno():
            self._accept(self._listener)
        elif fd in self._incoming:
            self._receive(self._incoming[fd])
        elif fd in self._targets:
            self._go_on(self._targets[fd], mask)

    def _open_session(self) -> None:
        self._generation += 1
        self._base = self._addresses.take()
        name = f"pdcluster-{secrets.token_hex(12)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        self._epoll.register(listener, select.EPOLLIN)
        self._listener = listener
        self._tell(Ready(f"{PREFIX}{name}", self._base, VERSION, self._generation))
        held = self._held
        self._held = []
        for request in held:
            self._begin(request)

    def _end_session(self) -> int:
        """Close every socket: from here on nothing of this generation lands or is read."""
        for incoming in self._incoming.values():
            incoming.close()
        for outgoing in self._outgoing.values():
            outgoing.close()
        if self._listener is not None:
            self._listener.close()
        self._incoming.clear()
        self._outgoing.clear()
        self._targets.clear()
        self._listener = None
        self._outstanding.clear()
        self._held.clear()
        self._events = [event for event in self._events if not isinstance(event, Completed)]
        return self._generation

    def _begin(self, request: Request) -> None:
        match request:
            case DigestRequest():
                digest = self._hash(request.source)
                self._complete(request.operation, ok=True, digest=digest)
            case WriteRequest():
                self._write(request)

    def _write(self, request: WriteRequest) -> None:
        try:
            link = self._link_to(request.target)
        except OSError as error:
            detail = f"no session {request.target}: {error.strerror or error}"
            self._complete(request.operation, ok=False, detail=detail)
            return
        digest = self._hash(request.source) if request.digest else 0
        deadline = time.monotonic() + self._deadlines.stall_seconds(self._outstanding.nbytes)
        link.add(request, digest=digest, deadline=deadline)
        self._epoll.modify(link.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _link_to(self, target: str) -> OutgoingLink:
        link = self._outgoing.get(target)
        if link is None:
            if not target.startswith(PREFIX):
                raise OSError(f"the name does not start with {PREFIX}")
            if len(self._outgoing) >= LINKS_MAX:
                raise OSError(f"{LINKS_MAX} peers are connected")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                sock.connect(f"\0{target.removeprefix(PREFIX)}")
            except OSError:
                sock.close()
                raise
            link = OutgoingLink(sock, self._arena)
            self._outgoing[target] = link
            self._targets[link.fileno()] = target
            self._epoll.register(link.fileno(), select.EPOLLIN)
        return link

    def _go_on(self, target: str, mask: int) -> None:
        """Send more to one peer and take its answers."""
        link = self._outgoing[target]
        try:
            if mask & select.EPOLLOUT and not link.send():
                self._epoll.modify(link.fileno(), select.EPOLLIN)
            for answered in link.answers():
                detail = "" if answered.ok else "the peer has not registered that memory"
                self._complete(
                    answered.operation, ok=answered.ok, digest=answered.digest, detail=detail
                )
        except LinkEnded as error:
            del self._targets[link.fileno()]
            del self._outgoing[target]
            for operation in link.close():
                self._complete(operation, ok=False, detail=f"{target}: {error}")

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.settimeout(0)
            if len(self._incoming) >= LINKS_MAX or not _same_user(sock):
                sock.close()
                continue
            self._incoming[sock.fileno()] = IncomingLink(sock, self._arena, base=self._base)
            self._epoll.register(sock, select.EPOLLIN)

    def _receive(self, link: IncomingLink) -> None:
        fd = link.fileno()
        try:
            unsent = link.receive()
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if unsent else 0))
        except LinkEnded:
            del self._incoming[fd]
            link.close()

    def _complete(self, operation: int, *, ok: bool, digest: int = 0, detail: str = "") -> None:
        if self._outstanding.remove(operation):
            self._tell(succeeded(operation, digest) if ok else failed(operation, detail))

    def _tell(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._timer.arm(0.0)

    def _hash(self, source: Pieces) -> int:
        return self._window.digest(
            source.offset, source.nbytes, pieces=source.count, stride=source.stride
        )

    def _due_at(self) -> float | None:
        return min(
            (at for link in self._outgoing.values() if (at := link.deadline()) is not None),
            default=None,
        )

    def _check_clock(self) -> None:
        """A write that made no end: end this session rather than report it as if it had stopped."""
        due = self._due_at()
        if due is None or time.monotonic() < due:
            return
        slow = [target for target, link in self._outgoing.items() if link.deadline() == due]
        generation = self._end_session()
        self._tell(Died(f"stalled: a write to {', '.join(slow)} made no end", generation))
        self._open_session()


def _same_user(sock: socket.socket) -> bool:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())
