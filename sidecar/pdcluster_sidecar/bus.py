"""The control channel to other sidecars: one ZMQ PULL per own rank, one PUSH per peer's rank.

What goes out never waits: a socket that is full, or whose peer is away, drops and counts, and the
nodes repeat what was not acknowledged. What comes in is cut, authenticated and decoded here, before
anything else sees it; a message that fails is counted by its reason and dropped, and the next one
is read.

A sealed message names its receiver as `session/port`, so counters run per socket (messages of two
sockets overtake each other freely) and nothing recorded on one port can be sent to another.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import zmq
import zmq.backend

from pdcluster_protocol.authentication import FrameSigner, FrameVerifier, KeyRing
from pdcluster_protocol.errors import ConfigError, Unauthorized, WireError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.push import frames, trailers
from pdcluster_sidecar.telemetry import Dropped, Metrics

QUEUED_MAX: Final = 2048
"""Messages that wait for one socket."""
READS_PER_WAKE: Final = 256
SOCKETS_MAX: Final = 4096

# A socket's own methods for whole messages cost three times the transport's work: they build flags
# from enums, and ask with a system option whether a part is the last, for every part.
_NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_send_part: Final = zmq.backend.Socket.send
_receive_part: Final = zmq.backend.Socket.recv

Deliver = Callable[[int, frames.Message, trailers.Trailer | None], None]
"""Port, message, and its checked trailer; None: it came without one."""


class Bus:
    """Sockets, seals and checks; who may say what is decided by `deliver`."""

    def __init__(
        self, host: str, *, ring: KeyRing, session: str, deliver: Deliver, metrics: Metrics
    ) -> None:
        self._host = host
        self._ring = ring
        self._session = session
        self._deliver = deliver
        self._metrics = metrics
        self._signer = FrameSigner(ring, session)
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 2 * SOCKETS_MAX)
        self._pulls: dict[int, tuple[zmq.Socket[bytes], FrameVerifier]] = {}
        self._pushes: OrderedDict[RankAddress, zmq.Socket[bytes]] = OrderedDict()

    def bind(self, port: int) -> None:
        """Receive for one rank.

        Raises:
            ConfigError: the port is busy or the host is not ours.
        """
        sock = self._context.socket(zmq.PULL)
        self._prepare(sock, self._host)
        sock.set(zmq.RCVHWM, QUEUED_MAX)
        sock.set(zmq.MAXMSGSIZE, Limits().message_bytes_max)
        try:
            sock.bind(_endpoint(RankAddress(self._host, port)))
        except zmq.ZMQError as error:
            sock.close()
            raise ConfigError(
                f"control_port: {self._host}:{port} cannot be bound ({error.strerror}); choose"
                " another control_port or end the process that holds it"
            ) from error
        self._pulls[port] = (sock, FrameVerifier(self._ring, f"{self._session}/{port}"))
        loop = asyncio.get_running_loop()
        loop.add_reader(sock.fileno(), self._readable, port)
        # The descriptor tells of changes only: what came before the reader must be asked for.
        loop.call_soon(self._readable, port)

    def send(
        self,
        to: RankAddress,
        message: frames.Message,
        *,
        peer_session: str | None,
        incarnation: str,
    ) -> None:
        """Seal and send; without a session of the peer, plain frames as SGLang sends them."""
        try:
            if peer_session is None:
                parts = frames.encode(message)
            else:
                receiver = f"{peer_session}/{to.port}"
                parts = frames.seal(
                    message, signer=self._signer, receiver=receiver, incarnation=incarnation
                )
        except WireError:
            self._metrics.drop(Dropped.MALFORMED)
            return
        try:
            _send(self._push(to), parts)
        except zmq.ZMQError:
            self._metrics.drop(Dropped.PEER_FULL)
            return
        self._metrics.sent.inc()

    def disconnect(self, to: RankAddress) -> None:
        """Forget the socket to one rank, and what waits in it."""
        sock = self._pushes.pop(to, None)
        if sock is not None:
            sock.close(linger=0)

    def close(self) -> None:
        """Close everything; unsent messages are lost."""
        loop = asyncio.get_running_loop()
        for sock, _ in self._pulls.values():
            loop.remove_reader(sock.fileno())
        self._pulls.clear()
        self._pushes.clear()
        self._context.destroy(linger=0)

    # --- receiving ------------------------------------------------------------------------------

    def _readable(self, port: int) -> None:
        entry = self._pulls.get(port)
        if entry is None:
            return
        sock, verifier = entry
        for _ in range(READS_PER_WAKE):
            try:
                parts = _receive(sock)
            except zmq.Again:
                return
            try:
                self._receive(port, parts, verifier)
            except Exception:
                # A fault of ours goes to the loop's handler; the next message is still read.
                asyncio.get_running_loop().call_soon(self._readable, port)
                raise
        # There may be more, and the descriptor will not say so again.
        asyncio.get_running_loop().call_soon(self._readable, port)

    def _receive(self, port: int, parts: list[bytes], verifier: FrameVerifier) -> None:
        try:
            content, trailer, mac = trailers.split(parts)
            if trailer is not None:
                verifier.verify(parts[:-1], mac, trailer.stamp)
            message = frames.decode(content, trailer)
        except Unauthorized:
            self._metrics.drop(Dropped.UNAUTHORIZED)
            return
        except WireError:
            self._metrics.drop(Dropped.MALFORMED)
            return
        self._deliver(port, message, trailer)

    # --- sending --------------------------------------------------------------------------------

    def _push(self, to: RankAddress) -> zmq.Socket[bytes]:
        sock = self._pushes.get(to)
        if sock is not None:
            self._pushes.move_to_end(to)
            return sock
        if len(self._pushes) >= SOCKETS_MAX:
            self._pushes.popitem(last=False)[1].close(linger=0)
        sock = self._context.socket(zmq.PUSH)
        self._prepare(sock, to.host)
        sock.set(zmq.SNDHWM, QUEUED_MAX)
        sock.set(zmq.RECONNECT_IVL, 50)
        sock.set(zmq.RECONNECT_IVL_MAX, 1000)
        sock.connect(_endpoint(to))
        self._pushes[to] = sock
        return sock

    def _prepare(self, sock: zmq.Socket[bytes], host: str) -> None:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.TCP_KEEPALIVE, 1)
        sock.set(zmq.TCP_KEEPALIVE_IDLE, 30)
        sock.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        sock.set(zmq.TCP_KEEPALIVE_CNT, 3)
        if ":" in host:
            sock.set(zmq.IPV6, 1)


def _send(sock: zmq.Socket[bytes], parts: list[bytes]) -> None:
    """Queue a message, or raise at once; a message is taken as a whole or not at all."""
    for part in parts[:-1]:
        _send_part(sock, part, _NOW_AND_MORE)
    _send_part(sock, parts[-1], _NOW)


def _receive(sock: zmq.Socket[bytes]) -> list[bytes]:
    """The next message; raises `zmq.Again` when there is none."""
    parts = []
    more = True
    while more:
        part = _receive_part(sock, _NOW, copy=False)
        parts.append(part.bytes)
        more = part.more
    return parts


def _endpoint(address: RankAddress) -> str:
    host = f"[{address.host.strip('[]')}]" if ":" in address.host else address.host
    return f"tcp://{host}:{address.port}"
