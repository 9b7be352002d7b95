"""The control socket between an engine and its transfer process: batches of small messages.

A frame is a 4-byte length and a msgpack array of messages. Both ends are non-blocking; what the
socket does not take is kept, and that is bounded because every message answers or asks for one of
at most `OPERATIONS_MAX` operations.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from pdcluster_protocol.undecodable import UNDECODABLE

FRAME_BYTES_MAX = 16 << 20
_READ_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")

MessageT = TypeVar("MessageT")


class ChannelClosed(Exception):
    """The other end is gone, or what it sent cannot be read."""


class Channel(Generic[MessageT]):
    """One end: sends any message structs, receives those of one union."""

    __slots__ = ("_decoder", "_encoder", "_incoming", "_outgoing", "_sock")

    def __init__(self, sock: socket.socket, received: object) -> None:
        """Take over `sock`; `received` is the union of structs that arrives here."""
        sock.settimeout(0)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[MessageT]] = msgspec.msgpack.Decoder(
            list[received]  # type: ignore[valid-type] # a union chosen at run time
        )

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    @property
    def unsent_bytes(self) -> int:
        """What waits for the socket to take it."""
        return len(self._outgoing)

    def send(self, messages: Sequence[msgspec.Struct]) -> None:
        """Queue one frame and send what the socket takes; a closed peer shows in `receive`."""
        body = self._encoder.encode(messages)
        self._outgoing += _LENGTH.pack(len(body))
        self._outgoing += body
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                # The reader finds the end of the stream and says it once.
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self) -> list[MessageT]:
        """Every message that is complete now.

        Raises:
            ChannelClosed: at the end of the stream or after unreadable bytes, once all messages
                before it have been handed out.
        """
        ended = self._fill()
        messages: list[MessageT] = []
        for body in self._frames():
            try:
                messages += self._decoder.decode(body)
            except UNDECODABLE as error:
                raise ChannelClosed(f"unreadable message: {error}") from error
        if ended and not messages:
            raise ChannelClosed("end of stream")
        return messages

    def shut_down(self) -> None:
        """Let both ends see the end of the stream; the descriptor stays until `close`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _fill(self) -> bool:
        """Read what is there and say whether the stream ended."""
        while True:
            try:
                chunk = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not chunk:
                return True
            self._incoming += chunk
            if len(chunk) < _READ_BYTES:
                return False

    def _frames(self) -> list[bytes]:
        bodies: list[bytes] = []
        position = 0
        while len(self._incoming) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, position)
            if length > FRAME_BYTES_MAX:
                raise ChannelClosed(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX}")
            end = position + _LENGTH.size + length
            if end > len(self._incoming):
                break
            bodies.append(bytes(self._incoming[position + _LENGTH.size : end]))
            position = end
        del self._incoming[:position]
        return bodies
