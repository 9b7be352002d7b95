"""The unix socket on which our own engine's ranks connect: length-prefixed msgpack, one rank each.

A rank says `EngineHello` first and nothing else before it is answered. A closed link is a dead
engine: the kernel closes it with the process, so death is known at once and needs no timeout. Only
processes of our own user are heard (`SO_PEERCRED`), and whatever cannot be decoded closes the link.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, cast

from pdcluster_protocol.codec import (
    FRAME_BYTES_MAX,
    FrameReader,
    engine_to_sidecar,
    frame,
    sidecar_to_engine,
)
from pdcluster_protocol.errors import ConfigError, WireError
from pdcluster_protocol.messages import EngineHello, EngineToSidecar, SidecarToEngine
from pdcluster_protocol.topology import RankCoordinate

HELLO_SECONDS: Final = 10.0
UNSENT_BYTES_MAX: Final = FRAME_BYTES_MAX
"""What an engine that does not read may leave here; beyond it messages are dropped."""
CONNECTIONS_MAX: Final = 1024
REJOIN_SECONDS: Final = 2.0
"""An engine that lost its sidecar dials again at least every second."""
_CREDENTIALS: Final = struct.Struct("3i")


class LinkOwner(Protocol):
    """Who acts on what the ranks say."""

    def greeted(self, link: Link, hello: EngineHello) -> None:
        """A connection said hello; answer it, and set its `coordinate` when it may stay."""

    def said(self, link: Link, message: EngineToSidecar) -> None:
        """A rank that was answered said something."""

    def closed(self, link: Link, detail: str) -> None:
        """A connection ended."""


class Link(asyncio.Protocol):
    """One rank's connection."""

    def __init__(
        self, owner: LinkOwner, count: Callable[[int], int], joined: asyncio.Event
    ) -> None:
        self._owner = owner
        self._count = count
        self._joined = joined
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._greeted = False
        self.coordinate: RankCoordinate | None = None
        """Set once the rank's hello was accepted."""
        self.detail = "the link closed"
        self.pid = 0

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.pid, uid = _credentials(self._transport)
        if self._count(1) > CONNECTIONS_MAX or uid != os.geteuid():
            self.close(f"refused: user {uid}, or too many connections")
            return
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(HELLO_SECONDS, self._silent)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                self._take(engine_to_sidecar.decode(payload))
        except WireError as error:
            self.close(error.detail)

    def connection_lost(self, exc: Exception | None) -> None:
        self._count(-1)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._owner.closed(self, self.detail if exc is None else f"the link broke: {exc}")

    # --- sending --------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the other end is still there, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: SidecarToEngine) -> bool:
        """Queue a message for the rank; False when it reads too slowly to take it."""
        transport = self._transport
        if transport is None or not self.open:
            return False
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            return False
        transport.write(frame(sidecar_to_engine.encode(message)))
        return True

    def close(self, detail: str) -> None:
        """End the connection after what is queued has left."""
        self.detail = detail
        if self._transport is not None:
            self._transport.close()

    # --- details --------------------------------------------------------------------------------

    def _take(self, message: EngineToSidecar) -> None:
        if isinstance(message, EngineHello):
            if self._greeted:
                raise WireError("a second hello on one connection")
            self._greeted = True
            if self._hello_timer is not None:
                self._hello_timer.cancel()
            self._owner.greeted(self, message)
            if self.coordinate is not None:
                self._joined.set()
        elif self.coordinate is None:
            raise WireError(f"{type(message).__name__} before the hello was answered")
        else:
            self._owner.said(self, message)

    def _silent(self) -> None:
        self.close(f"no hello within {HELLO_SECONDS:g} s")


class LinkServer:
    """Listens on the socket file and owns it."""

    def __init__(self, path: str, owner: LinkOwner) -> None:
        self._path = Path(path)
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._inherited = False
        self._joined = asyncio.Event()

    async def start(self) -> None:
        """Bind; a file that a killed sidecar left is taken over, that of a living one is not.

        Raises:
            ConfigError: the path is in use, too long, or cannot be bound.
        """
        self._inherited = self._clear_stale()
        loop = asyncio.get_running_loop()
        before = os.umask(0o177)
        try:
            self._server = await loop.create_unix_server(
                lambda: Link(self._owner, self._change, self._joined), str(self._path), backlog=128
            )
        except OSError as error:
            raise ConfigError(f"link_path {self._path}: {error.strerror or error}") from error
        finally:
            os.umask(before)

    async def rejoined(self) -> bool:
        """Where a sidecar before us left its file, wait for its engine, which may live.

        Until a rank has come back we would name no incarnation, which is what a dead engine looks
        like. False when none came in time.
        """
        if not self._inherited:
            return True
        try:
            async with asyncio.timeout(REJOIN_SECONDS):
                return await self._joined.wait()
        except TimeoutError:
            return False

    async def close(self) -> None:
        """Stop listening; the links close with the process.

        The file stays if an engine is linked: it tells the next sidecar to wait for it.
        """
        if self._server is not None:
            self._server.close()
            if self._connections == 0:
                self._path.unlink(missing_ok=True)

    def _change(self, by: int) -> int:
        self._connections += by
        return self._connections

    def _clear_stale(self) -> bool:
        """Remove what a sidecar before us left; whether there was anything."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"link_path {self._path}: {error.strerror}") from error
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"link_path {self._path} is no socket; give a path of its own")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(str(self._path)) == 0:
                raise ConfigError(f"link_path {self._path} is served by another sidecar")
        self._path.unlink(missing_ok=True)
        return True


def _credentials(transport: asyncio.Transport) -> tuple[int, int]:
    """Process and user at the other end."""
    sock = transport.get_extra_info("socket")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
