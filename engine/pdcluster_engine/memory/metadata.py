"""Metadata ("aux") rows in SGLang's order: what decode needs beside the pages.

A slot is one index into ten buffers. Both sides pair the buffers by position, so order, types and
widths are wire format. In our arena the ten rows of a slot lie side by side, so that one write
moves them; who has a table for each buffer gets them one by one.

    #  buffer                type × width    used
    0  output ids            int32 × 16      [0] the first token
    1  cached tokens         int32 × 16      [0] prompt tokens that prefill did not compute
    2  logprob value         float32 × 16    [0]
    3  logprob id            int32 × 16      [0]
    4  top logprob values    float32 × 128   the first k
    5  top logprob ids       int32 × 128     the first k
    6  speculative p         float32 × 16
    7  speculative index     int64 × 16
    8  hidden states         float32 × 16
    9  room                  uint64 × 8      [0] the room; 0 means "not written"

SGLang's rows do not say how many top logprobs they hold, since both of its legs know the request.
Ours end the list with id −1, which no vocabulary has, and say "no logprob" the same way; a reader
that counts by the request sees nothing unusual.

The room is the last, so a reader that finds its own room finds a whole row.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from pdcluster_engine.memory.window import ByteWindow
from pdcluster_protocol.ids import ROOM_MAX, ROOM_UNWRITTEN
from pdcluster_protocol.ranks import SlotTable

TOP_LOGPROBS_MAX = 128
_ABSENT = -1

_ROW_FORMATS = (
    "<16i", "<16i", "<16f", "<16i", "<128f", "<128i", "<16f", "<16q", "<16f", "<8Q"
)  # fmt: skip
_ITEM_BYTES = tuple(struct.calcsize(row_format) for row_format in _ROW_FORMATS)
_STARTS = tuple(accumulate(_ITEM_BYTES, initial=0))
(_TOKEN, _CACHED, _LOGPROB, _LOGPROB_ID, _TOP, _TOP_ID) = range(6)
_ROOM = len(_ROW_FORMATS) - 1

_ROOM_FIRST = struct.Struct("<Q")
METADATA_SLOT_BYTES = sum(_ITEM_BYTES)
"""Bytes that one slot takes over all buffers."""


class MetadataRow(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-over: the first token, how it was chosen, and whose it is."""

    token: int
    cached_tokens: int = 0
    logprob: float | None = None
    """Of `token`; exact when it is a float32, as logprobs are."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    room: int


class MetadataTable:
    """`slot_count` slots of ten rows, one behind the other from `offset` of `window`."""

    __slots__ = ("_window", "place", "slot_count")

    def __init__(self, window: ByteWindow, offset: int, slot_count: int) -> None:
        end = offset + metadata_bytes(slot_count)
        if slot_count < 1 or offset < 0 or end > window.nbytes:
            message = (
                f"{slot_count} slots at {offset} end at {end}; the window has {window.nbytes} bytes"
            )
            raise ValueError(message)
        self.slot_count = slot_count
        self._window = window
        self.place = SlotTable(offset, _ITEM_BYTES)
        """Where the rows lie, in wire order."""

    def write(self, slot: int, row: MetadataRow) -> None:
        """Fill a slot; everything that the row does not say becomes zero.

        Raises:
            ValueError: a room outside [1, 2^63 - 1], a token that is no int32, or more than 128
                top logprobs: a fault of the caller.
        """
        _require_writable(row)
        ids = [token for token, _ in row.top_logprobs]
        values = [value for _, value in row.top_logprobs]
        if len(ids) < TOP_LOGPROBS_MAX:
            ids.append(_ABSENT)
        has_logprob = row.logprob is not None
        packed = bytearray(METADATA_SLOT_BYTES)
        _pack(packed, _TOKEN, [row.token])
        _pack(packed, _CACHED, [row.cached_tokens])
        _pack(packed, _LOGPROB, [row.logprob if row.logprob is not None else 0.0])
        _pack(packed, _LOGPROB_ID, [row.token if has_logprob else _ABSENT])
        _pack(packed, _TOP, values)
        _pack(packed, _TOP_ID, ids)
        _pack(packed, _ROOM, [row.room])
        self._window.write(self._start(slot, 0), bytes(packed))

    def read(self, slot: int, *, top_logprobs: int | None = None) -> MetadataRow:
        """What the slot holds, unchecked: `room` 0 means that nothing was written.

        `top_logprobs` counts by the request, for rows of a plain SGLang peer; without it the list
        ends at the first absent id.
        """
        ids = self._get(slot, _TOP_ID)
        values = self._get(slot, _TOP)
        absent = ids.index(_ABSENT) if _ABSENT in ids else TOP_LOGPROBS_MAX
        count = absent if top_logprobs is None else min(absent, top_logprobs)
        has_logprob = self._get(slot, _LOGPROB_ID)[0] != _ABSENT
        return MetadataRow(
            token=self._get(slot, _TOKEN)[0],
            cached_tokens=self._get(slot, _CACHED)[0],
            logprob=self._get(slot, _LOGPROB)[0] if has_logprob else None,
            top_logprobs=tuple(zip(ids[:count], values[:count], strict=True)),
            room=self.room(slot),
        )

    def room(self, slot: int) -> int:
        """The slot's room alone, which says whether the row was written."""
        packed = self._window.read(self._start(slot, _ROOM), _ROOM_FIRST.size)
        room: int = _ROOM_FIRST.unpack(packed)[0]
        return room

    def clear(self, slot: int) -> None:
        """Say "not written", before the slot is handed out or given back."""
        empty = bytearray(_ITEM_BYTES[_ROOM])
        _ROOM_FIRST.pack_into(empty, 0, ROOM_UNWRITTEN)
        self._window.write(self._start(slot, _ROOM), bytes(empty))

    def _start(self, slot: int, buffer: int) -> int:
        if not 0 <= slot < self.slot_count:
            message = f"slot {slot} is not in [0, {self.slot_count})"
            raise ValueError(message)
        return self.place.offset + slot * METADATA_SLOT_BYTES + _STARTS[buffer]

    def _get(self, slot: int, buffer: int) -> tuple[int, ...]:
        packed = self._window.read(self._start(slot, buffer), _ITEM_BYTES[buffer])
        return struct.unpack(_ROW_FORMATS[buffer], packed)


class RankMetadata:
    """The tables of all ranks of an engine: the same slot of each belongs to one request."""

    __slots__ = ("_tables",)

    def __init__(self, tables: Sequence[MetadataTable]) -> None:
        self._tables = tuple(tables)

    def write(self, slot: int, row: MetadataRow) -> None:
        """Fill a slot in every rank, since each may have to send it; see `MetadataTable.write`."""
        for table in self._tables:
            table.write(slot, row)

    def read(self, slot: int, *, top_logprobs: int | None = None) -> MetadataRow:
        """What the first rank's slot holds; see `MetadataTable.read`."""
        return self._tables[0].read(slot, top_logprobs=top_logprobs)

    def room(self, slot: int) -> int:
        """The room that every rank's slot says; 0 when one is not written, or they differ."""
        rooms = {table.room(slot) for table in self._tables}
        return rooms.pop() if len(rooms) == 1 else ROOM_UNWRITTEN

    def clear(self, slot: int) -> None:
        """Say "not written" in every rank."""
        for table in self._tables:
            table.clear(slot)


def metadata_bytes(slot_count: int) -> int:
    """The bytes of a table of so many slots."""
    return METADATA_SLOT_BYTES * slot_count


def row_fault(row: MetadataRow, *, room: int, vocab_size: int) -> str:
    """Why a row that a peer wrote cannot begin this room's answer; empty when it can."""
    if row.room != room:
        return f"it is of room {row.room}, not of {room}"
    for token in (row.token, *(token for token, _ in row.top_logprobs)):
        if not 0 <= token < vocab_size:
            return f"it holds token {token}, which is not in [0, {vocab_size})"
    return ""


def _pack(packed: bytearray, buffer: int, values: Sequence[int] | Sequence[float]) -> None:
    """The first values of a row; those behind them stay zero."""
    row_format = f"<{len(values)}{_ROW_FORMATS[buffer][-1]}"
    struct.pack_into(row_format, packed, _STARTS[buffer], *values)


def _require_writable(row: MetadataRow) -> None:
    if not ROOM_UNWRITTEN < row.room <= ROOM_MAX:
        message = f"room {row.room} is not in [1, 2^63 - 1]"
        raise ValueError(message)
    if not 0 <= row.token < 1 << 31:
        message = f"token {row.token} is no id: it must be in [0, 2^31)"
        raise ValueError(message)
    if len(row.top_logprobs) > TOP_LOGPROBS_MAX:
        message = f"{len(row.top_logprobs)} top logprobs; a row holds {TOP_LOGPROBS_MAX}"
        raise ValueError(message)
