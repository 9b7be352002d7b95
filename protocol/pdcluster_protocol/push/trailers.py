"""The two frames behind a message: what SGLang has no frame for, and the MAC.

To peers that announced our wire version every message is followed by a `Trailer` (version, stamp,
incarnation, key, our own fields) and by 32 bytes of MAC over all frames before it. SGLang's
receivers ignore frames behind those they know; its senders have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from pdcluster_protocol.authentication import MAC_BYTES, FrameSigner, Stamp
from pdcluster_protocol.errors import WireError
from pdcluster_protocol.ids import ATTEMPT_MAX, Key
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import WIRE_VERSION_MAX, WIRE_VERSION_MIN, Run
from pdcluster_protocol.undecodable import UNDECODABLE

TRAILER_BYTES_MAX: Final = 8192
TEXT_LENGTH_MAX: Final = 512
"""Longer texts are cut: a trailer is small."""
_TAG: Final = "PD_TRAILER"
_HEAD: Final = bytes([0xA0 | len(_TAG)]) + _TAG.encode()
_BYTES_MAX: Final = Limits().message_bytes_max
_FRAMES_MAX: Final = Limits().frames_max


class Trailer(msgspec.Struct, frozen=True, array_like=True, tag=_TAG):
    """The last frame but one."""

    version: int
    stamp: Stamp
    incarnation: str
    """The sender's instance; empty while it has none."""
    key: Key | None = None
    """None for what belongs to no room."""
    extra: dict[str, bool | int | str] = {}
    """Our fields of a message that SGLang has frames for."""
    runs: tuple[Run, ...] = ()
    """That landed last, behind a final status."""


class Carried(NamedTuple):
    """What a trailer says of its message."""

    key: Key | None
    extra: dict[str, bool | int | str]
    runs: tuple[Run, ...] = ()


class Split(NamedTuple):
    """A multipart message cut into its parts."""

    content: Sequence[bytes]
    trailer: Trailer | None
    """None: a plain peer, or ours without trailing frames."""
    mac: bytes


_trailers: Final = msgspec.msgpack.Decoder(Trailer)
_encoder: Final = msgspec.msgpack.Encoder()


def append(
    frames: list[bytes],
    *,
    signer: FrameSigner,
    receiver: str,
    incarnation: str,
    carried: Carried,
) -> None:
    """Put trailer and MAC behind `frames`, for the session `receiver`."""
    stamp = signer.stamp(receiver)
    cut = {
        name: value[:TEXT_LENGTH_MAX] if isinstance(value, str) else value
        for name, value in carried.extra.items()
    }
    trailer = Trailer(WIRE_VERSION_MAX, stamp, incarnation, carried.key, cut, carried.runs)
    frames.append(_encoder.encode(trailer))
    frames.append(signer.mac(frames, stamp))


def split(frames: Sequence[bytes]) -> Split:
    """Cut off trailer and MAC, if there are any; the MAC is for the caller to check.

    Raises:
        WireError: too many or too large frames, an undecodable trailer or an unknown version.
    """
    if not 0 < len(frames) <= _FRAMES_MAX:
        raise WireError(f"{len(frames)} frames; 1 to {_FRAMES_MAX} are taken")
    size = sum(map(len, frames))
    if size > _BYTES_MAX:
        raise WireError(f"message of {size} bytes; at most {_BYTES_MAX} are taken")
    if len(frames) < 3 or frames[-2][1 : 1 + len(_HEAD)] != _HEAD:
        return Split(frames, None, b"")
    if len(frames[-1]) != MAC_BYTES or len(frames[-2]) > TRAILER_BYTES_MAX:
        raise WireError(
            f"trailer of {len(frames[-2])} bytes with a MAC of {len(frames[-1])} bytes;"
            f" at most {TRAILER_BYTES_MAX} and exactly {MAC_BYTES} are taken"
        )
    try:
        trailer = _trailers.decode(frames[-2])
    except UNDECODABLE as error:
        raise WireError(f"undecodable trailer: {error}") from error
    if not WIRE_VERSION_MIN <= trailer.version <= WIRE_VERSION_MAX:
        raise WireError(
            f"wire version {trailer.version} is unknown;"
            f" {WIRE_VERSION_MIN} to {WIRE_VERSION_MAX} are spoken"
        )
    if trailer.key is not None and not 0 <= trailer.key.attempt <= ATTEMPT_MAX:
        raise WireError(f"attempt {trailer.key.attempt} is out of range")
    return Split(frames[:-2], trailer, frames[-1])


class Extra:
    """Our fields of one message: absent ones have their default, wrong ones are a `WireError`."""

    __slots__ = ("_fields",)

    def __init__(self, trailer: Trailer | None) -> None:
        self._fields: dict[str, bool | int | str] = {} if trailer is None else trailer.extra

    def number(self, name: str, *, default: int = 0) -> int:
        value = self._fields.get(name, default)
        if not isinstance(value, int) or value < 0:
            raise WireError(f"{name} is {value!r}; it must be a number from 0")
        return int(value)

    def text(self, name: str) -> str:
        value = self._fields.get(name, "")
        if not isinstance(value, str) or len(value) > TEXT_LENGTH_MAX:
            raise WireError(f"{name} must be a text of at most {TEXT_LENGTH_MAX} characters")
        return value
