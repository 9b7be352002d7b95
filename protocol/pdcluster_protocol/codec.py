"""Bytes to messages and back, bounded: what cannot be decoded is a `WireError`, never a crash."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from pdcluster_protocol.errors import WireError
from pdcluster_protocol.messages import EngineToSidecar, NodeMessage, SidecarToEngine
from pdcluster_protocol.sidecar_messages import SidecarMessage
from pdcluster_protocol.undecodable import UNDECODABLE

LENGTH_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 32 << 20
"""A link frame: `EngineHello` carries a tokenizer, tens of MB at most."""

MessageT = TypeVar("MessageT")


class Codec(Generic[MessageT]):
    """One tagged union as msgpack."""

    __slots__ = ("_bytes_max", "_decoder", "_encoder")

    def __init__(self, union: object, *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()
        self._bytes_max = bytes_max

    def encode(self, message: MessageT) -> bytes:
        """The message as msgpack."""
        return self._encoder.encode(message)

    def decode(self, raw: bytes | memoryview) -> MessageT:
        """The message in `raw`.

        Raises:
            WireError: too long, not msgpack, an unknown tag, a missing or wrong field.
        """
        if len(raw) > self._bytes_max:
            raise WireError(f"message of {len(raw)} bytes; at most {self._bytes_max} are taken")
        try:
            return self._decoder.decode(raw)
        except UNDECODABLE as error:
            raise WireError(f"undecodable message: {error}") from error


engine_to_sidecar: Codec[EngineToSidecar] = Codec(EngineToSidecar)
sidecar_to_engine: Codec[SidecarToEngine] = Codec(SidecarToEngine)
node_messages: Codec[NodeMessage] = Codec(NodeMessage)
sidecar_messages: Codec[SidecarMessage] = Codec(SidecarMessage)


class FrameReader:
    """Cuts a byte stream into frames of a 4-byte little-endian length and that many bytes."""

    __slots__ = ("_buffer", "_bytes_max")

    def __init__(self, *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._bytes_max = bytes_max

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add what was read; return the frames that are now complete.

        Raises:
            WireError: a frame announces more than the bound.
        """
        self._buffer += chunk
        frames = []
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[start : start + LENGTH_BYTES], "little")
            if size > self._bytes_max:
                raise WireError(f"frame of {size} bytes; at most {self._bytes_max} are taken")
            end = start + LENGTH_BYTES + size
            if end > len(self._buffer):
                break
            frames.append(bytes(self._buffer[start + LENGTH_BYTES : end]))
            start = end
        del self._buffer[:start]
        return frames


def frame(payload: bytes) -> bytes:
    """`payload` with its length in front."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload
