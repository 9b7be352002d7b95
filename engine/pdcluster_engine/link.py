"""The unix socket to our own sidecar: the engine's only control neighbour.

The sidecar listens, the engine dials, and dials again for ever (0.05 s doubling to 1 s): a sidecar
that is away fails no running room. Every connection begins with `EngineHello`, which carries the
incarnation once it is known and a snapshot of the open rooms; nothing else leaves before the
sidecar has answered it.

While the link is down, messages to peers are kept up to a bound, oldest out first: the nodes repeat
what is not acknowledged, so losing some costs time and never a room. The same holds for frames that
the kernel had taken when the sidecar died.

One thread owns a `Link`. It never blocks; what waits for the socket or for a clock shows in
`wants_write` and `deadline`.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable
from enum import Enum

from pdcluster_protocol.codec import FrameReader, engine_to_sidecar, frame, sidecar_to_engine
from pdcluster_protocol.errors import PDClusterError, Reason, WireError
from pdcluster_protocol.messages import (
    EngineHello,
    EngineToSidecar,
    HelloAnswer,
    SidecarToEngine,
)

REDIAL_SECONDS_MIN = 0.05
REDIAL_SECONDS_MAX = 1.0
_READ_BYTES = 256 << 10
_READS_PER_WAKE = 16
"""Bounds one turn of the owner's loop, whatever the sidecar sends."""
_WRITE_BYTES = 256 << 10


class LinkState(Enum):
    """Where the link is; only `JOINED` carries messages."""

    DOWN = "down"
    GREETING = "greeting"
    JOINED = "joined"


class LinkRefused(PDClusterError):
    """The sidecar said why this rank may not join; trying again cannot help."""

    reason = Reason.NOT_READY


class Link:
    """The engine's end of the link; `hello` is asked for a fresh greeting at every connection."""

    __slots__ = (
        "_backoff_seconds",
        "_dial_at",
        "_frames",
        "_hello",
        "_outgoing",
        "_path",
        "_queue_max",
        "_reader",
        "_sent",
        "_sock",
        "dropped",
        "incarnation",
        "state",
    )

    def __init__(self, path: str, *, hello: Callable[[], EngineHello], queue_max: int) -> None:
        self._path = path
        self._hello = hello
        self._queue_max = queue_max
        self._sock: socket.socket | None = None
        self._reader = FrameReader()
        self._outgoing = bytearray()
        """What this connection must still send; dies with it."""
        self._sent = 0
        self._frames: deque[bytes] = deque()
        """What waits for the link; outlives connections."""
        self._dial_at: float | None = None
        self._backoff_seconds = REDIAL_SECONDS_MIN
        self.state = LinkState.DOWN
        self.incarnation = ""
        self.dropped = 0
        """Messages that went over the bound while the link was down."""

    def fileno(self) -> int:
        """The socket's descriptor, or -1 while there is no connection."""
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether the owner should wait for the socket to take more."""
        return self._sock is not None and self._sent < len(self._outgoing)

    @property
    def queued(self) -> int:
        """Messages that wait for the link."""
        return len(self._frames)

    def open(self, now: float) -> None:
        """Allow dialling, the first time at once."""
        if self._dial_at is None and self._sock is None:
            self._dial_at = now

    def deadline(self) -> float | None:
        """When `dial_if_due` has something to do."""
        return self._dial_at

    def dial_if_due(self, now: float) -> None:
        """Connect when the time has come; a refusal only sets the next time."""
        if self._dial_at is None or now < self._dial_at:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.settimeout(0)
        failure = sock.connect_ex(self._path)
        if failure not in (0, errno.EISCONN):
            sock.close()
            self._redial(now)
            return
        self._sock = sock
        self._dial_at = None
        self._reader = FrameReader()
        self._outgoing = bytearray(frame(engine_to_sidecar.encode(self._hello())))
        self._sent = 0
        self.state = LinkState.GREETING
        self.flush(now)

    def send(self, message: EngineToSidecar) -> None:
        """Queue a message; `flush` sends it. Over the bound the oldest one is dropped."""
        if len(self._frames) >= self._queue_max:
            self._frames.popleft()
            self.dropped += 1
        self._frames.append(frame(engine_to_sidecar.encode(message)))

    def flush(self, now: float) -> None:
        """Send what the socket takes."""
        while self._sock is not None:
            self._refill()
            if self._sent >= len(self._outgoing):
                return
            try:
                with memoryview(self._outgoing) as view, view[self._sent :] as rest:
                    self._sent += self._sock.send(rest)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._lost(now)
                return

    def receive(self, now: float) -> list[SidecarToEngine]:
        """What has arrived; a lost connection ends the list and schedules the next dial.

        Raises:
            LinkRefused: the sidecar refuses this rank.
        """
        messages: list[SidecarToEngine] = []
        for _ in range(_READS_PER_WAKE):
            if self._sock is None:
                break
            try:
                chunk = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._lost(now)
                break
            if not chunk or not self._decode(chunk, messages):
                self._lost(now)
                break
            if len(chunk) < _READ_BYTES:
                # The socket is empty; what comes next wakes the owner again.
                break
        return messages

    def close(self) -> None:
        """Close the connection and dial no more."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._dial_at = None
        self.state = LinkState.DOWN

    def _decode(self, chunk: bytes, messages: list[SidecarToEngine]) -> bool:
        """Append what is complete; False when the stream makes no sense any more."""
        try:
            for payload in self._reader.feed(chunk):
                message = sidecar_to_engine.decode(payload)
                if isinstance(message, HelloAnswer):
                    self._joined(message)
                messages.append(message)
        except WireError:
            return False
        return True

    def _joined(self, answer: HelloAnswer) -> None:
        if answer.refused:
            raise LinkRefused(f"the sidecar at {self._path} refuses this rank: {answer.refused}")
        if self.incarnation and answer.incarnation != self.incarnation:
            # Peers have been told that our rooms are dead; only a fresh process is honest.
            raise LinkRefused(
                f"the sidecar at {self._path} ended incarnation {self.incarnation}"
                f" and answers with {answer.incarnation}"
            )
        self.incarnation = answer.incarnation
        self.state = LinkState.JOINED
        self._backoff_seconds = REDIAL_SECONDS_MIN

    def _refill(self) -> None:
        """Move queued frames into the connection's buffer once what was there has left."""
        if self._sent < len(self._outgoing) or self.state is not LinkState.JOINED:
            return
        self._outgoing.clear()
        self._sent = 0
        while self._frames and len(self._outgoing) < _WRITE_BYTES:
            self._outgoing += self._frames.popleft()

    def _lost(self, now: float) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._outgoing.clear()
        self._sent = 0
        self.state = LinkState.DOWN
        self._redial(now)

    def _redial(self, now: float) -> None:
        self._dial_at = now + self._backoff_seconds
        self._backoff_seconds = min(self._backoff_seconds * 2, REDIAL_SECONDS_MAX)
