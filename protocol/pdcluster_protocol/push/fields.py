"""The field encodings inside SGLang's frames, each bounded and strict.

int       ASCII decimal without padding
u64[] …   values of one struct format back to back, little-endian (as all machines that run it)
lists(F)  u32 count, one u32 byte length per list, then the lists; no list at all is no byte
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Final

from pdcluster_protocol.errors import WireError
from pdcluster_protocol.ids import ROOM_MAX, RankAddress

INTEGER_MAX: Final = (1 << 63) - 1
LISTS_MAX: Final = 4096
_INTEGER: Final = re.compile(rb"-?(0|[1-9][0-9]{0,19})")
_HOST: Final = re.compile(rb"[A-Za-z0-9_:%.\-\[\]]{1,253}")
_TEXT: Final = re.compile(rb"[\x21-\x7e]{0,512}")


def parse_integer(frame: bytes, name: str, *, low: int = 0, high: int = INTEGER_MAX) -> int:
    """The number in an ASCII frame.

    Raises:
        WireError: no number, or not in [low, high].
    """
    if _INTEGER.fullmatch(frame) is None:
        raise WireError(f"{name} is {bytes(frame[:32])!r}; it must be a decimal number")
    number = int(frame)
    if not low <= number <= high:
        raise WireError(f"{name} is {number}; it must be in [{low}, {high}]")
    return number


def parse_room(frame: bytes) -> int:
    """A room in [1, 2^63 - 1]; 0 means "not written" in a metadata slot and is no room.

    Raises:
        WireError: anything else.
    """
    return parse_integer(frame, "room", low=1, high=ROOM_MAX)


def parse_text(frame: bytes, name: str) -> str:
    """Printable ASCII without spaces, at most 512 characters.

    Raises:
        WireError: anything else.
    """
    if _TEXT.fullmatch(frame) is None:
        raise WireError(f"{name} is {bytes(frame[:32])!r}; it must be short printable ASCII")
    return frame.decode("ascii")


def parse_address(host: bytes, port: bytes) -> RankAddress:
    """An address of two frames.

    Raises:
        WireError: no host name or address, or no port.
    """
    if _HOST.fullmatch(host) is None:
        raise WireError(f"host is {bytes(host[:64])!r}; it must be a name or an address")
    return RankAddress(host.decode("ascii"), parse_integer(port, "port", low=1, high=65535))


def numbers(code: str, frame: bytes, name: str) -> tuple[int, ...]:
    """The values of a frame of one struct format.

    Raises:
        WireError: its length is no multiple of the format's.
    """
    size = struct.calcsize(f"<{code}")
    if len(frame) % size:
        raise WireError(f"{name}: {len(frame)} bytes are no multiple of {size}")
    return struct.unpack(f"<{len(frame) // size}{code}", frame)


def pack_numbers(code: str, values: Sequence[int]) -> bytes:
    """The reverse of `numbers`.

    Raises:
        WireError: a value does not fit the format.
    """
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except struct.error as error:
        raise WireError(f"a value does not fit its frame: {error}") from error


def lists(code: str, frame: bytes, name: str) -> tuple[tuple[int, ...], ...]:
    """The lists in a frame.

    Raises:
        WireError: a count or length that the bytes do not bear out.
    """
    if not frame:
        return ()
    count = int.from_bytes(frame[:4], "little")
    start = 4 + 4 * count
    if len(frame) < 4 or count > LISTS_MAX or len(frame) < start:
        raise WireError(f"{name}: {len(frame)} bytes cannot hold {count} lists")
    lengths = struct.unpack_from(f"<{count}I", frame, 4)
    if start + sum(lengths) != len(frame):
        raise WireError(f"{name}: the lists have {len(frame) - start} bytes, not {sum(lengths)}")
    found = []
    for length in lengths:
        found.append(numbers(code, frame[start : start + length], name))
        start += length
    return tuple(found)


def pack_lists(code: str, values: Sequence[Sequence[int]]) -> bytes:
    """The reverse of `lists`.

    Raises:
        WireError: a value does not fit the format.
    """
    if not values:
        return b""
    packed = [pack_numbers(code, inner) for inner in values]
    head = struct.pack(f"<{1 + len(packed)}I", len(packed), *map(len, packed))
    return head + b"".join(packed)
