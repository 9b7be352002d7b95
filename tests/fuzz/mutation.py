"""Edits: how a valid input is bent into a hostile one.

An input is a list of parts (frames, bodies, chunks). An `Edit` names a part, a place in it and a
payload, and any edit can be applied to any input, so that the same edits are drawn by a plain
random generator (many, fast) and by hypothesis (few, and made small when one of them finds a
fault).

Half of the kinds know no format and bend bytes. `VALUE` and `NAME` decode a part that is JSON or
msgpack, exchange one value or one key inside it, and encode it again, which comes further than
bytes: what they make still has the right form.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

Parts = list[bytes]
PARTS_MAX = 80
PART_BYTES_MAX = 1 << 16
PAYLOAD_BYTES_MAX = 12
DEPTHS = (3, 200, 5000)
NESTS = (b"[", b"{", b"\x91", b"\x81\xa1a", b'{"a":', b"- ", b"(")

NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 1023, 1024, 65535, 65536),
    *((1 << bits) + by for bits in (31, 32, 53, 63) for by in (-1, 0, 1)),
    *(-(1 << 31), -(1 << 63), (1 << 64) - 1, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan")),
)
TEXTS = (
    *("", "a", "0", "-1", " 1", "1e3", "null", "x" * 64, "x" * 513, "x" * 5000, "\0", "\n", "é"),
    *("\N{COMBINING ACUTE ACCENT}" * 9, "\U0001f600", "2.2.2.2", "::1", "[::1]", "a b", "%00"),
    *("127.0.0.1", "127.64.0.2", "builtin://tiny-glm", "user", "stop", "0" * 400, "Early", "../k"),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [0] * 300, [[0]] * 3, {"a": 1}, {"role": "user"}, b""),
    *(b"\0" * 8, b"\xff" * 9, ["a"] * 9, {"": None}),
)
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, *OTHERS)


class Kind(StrEnum):
    """What an edit does."""

    SET = "set"
    INSERT = "insert"
    DELETE = "delete"
    CUT = "cut"
    REPEAT = "repeat"
    NUMBER = "number"
    NEST = "nest"
    VALUE = "value"
    NAME = "name"
    REPLACE_PART = "replace part"
    DROP_PART = "drop part"
    DOUBLE_PART = "double part"
    SWAP_PARTS = "swap parts"


class Edit(msgspec.Struct, frozen=True):
    """One step; numbers are taken modulo what is there."""

    kind: Kind
    part: int
    at: int
    payload: bytes

    @property
    def choice(self) -> int:
        """A number from the payload, for kinds that choose from a list."""
        return int.from_bytes(self.payload[:3], "little")


KINDS = tuple(Kind)
EDIT_STRATEGY = st.builds(
    Edit,
    st.sampled_from(KINDS),
    st.integers(0, 255),
    st.integers(0, 1 << 16),
    st.binary(max_size=PAYLOAD_BYTES_MAX),
)


def drawn_edits(dice: Random) -> list[Edit]:
    """A few edits, mostly one or two: with many nothing valid would be left."""
    count = 1 + min(dice.getrandbits(2), dice.getrandbits(2), dice.getrandbits(2))
    return [
        Edit(
            KINDS[dice.randrange(len(KINDS))],
            dice.getrandbits(8),
            dice.getrandbits(16),
            dice.randbytes(dice.randrange(PAYLOAD_BYTES_MAX + 1)),
        )
        for _ in range(count)
    ]


def edited(parts: Sequence[bytes], edits: Sequence[Edit]) -> Parts:
    """The input after all edits."""
    changed = list(parts)
    for edit in edits:
        _apply(changed, edit)
    return changed


def _apply(parts: Parts, edit: Edit) -> None:
    if not parts:
        parts.append(edit.payload)
        return
    index = edit.part % len(parts)
    match edit.kind:
        case Kind.REPLACE_PART:
            parts[index] = edit.payload
        case Kind.DROP_PART:
            del parts[index]
        case Kind.DOUBLE_PART:
            if len(parts) < PARTS_MAX:
                parts.insert(edit.at % (len(parts) + 1), parts[index])
        case Kind.SWAP_PARTS:
            other = edit.at % len(parts)
            parts[index], parts[other] = parts[other], parts[index]
        case Kind.VALUE | Kind.NAME:
            parts[index] = _restructured(parts[index], edit)
        case _:
            parts[index] = _bent(parts[index], edit)[:PART_BYTES_MAX]


def _bent(raw: bytes, edit: Edit) -> bytes:
    at = edit.at % (len(raw) + 1)
    payload = edit.payload
    match edit.kind:
        case Kind.SET:
            return raw[:at] + payload[:4] + raw[at + len(payload[:4]) :]
        case Kind.INSERT:
            return raw[:at] + payload + raw[at:]
        case Kind.DELETE:
            return raw[:at] + raw[at + 1 + edit.choice % 8 :]
        case Kind.CUT:
            return raw[:at]
        case Kind.REPEAT:
            piece = raw[at : at + 1 + edit.choice % 64]
            return raw[:at] + piece * (2 + edit.choice % 64) + raw[at:]
        case Kind.NUMBER:
            return _renumbered(raw, at, NUMBERS[edit.choice % len(NUMBERS)])
        case _:
            nest = NESTS[edit.choice % len(NESTS)] * DEPTHS[edit.at % len(DEPTHS)]
            return raw[:at] + nest + raw[at:]


DIGITS = frozenset(string.digits.encode())


def _renumbered(raw: bytes, at: int, number: int | float) -> bytes:
    """Exchange the decimal number around `at`, or write eight bytes of one over what is there."""
    start = end = at
    while start > 0 and raw[start - 1] in DIGITS:
        start -= 1
    while end < len(raw) and raw[end] in DIGITS:
        end += 1
    if start < end:
        return raw[:start] + repr(number).encode() + raw[end:]
    packed = (int(number) if abs(number) < float("inf") else 0) & ((1 << 64) - 1)
    return raw[:at] + packed.to_bytes(8, "little") + raw[at + 8 :]


def _restructured(raw: bytes, edit: Edit) -> bytes:
    """Exchange one value, or one key, inside a part that can be decoded; else leave it."""
    is_json = raw[:1] in (b"{", b"[")
    try:
        value = msgspec.json.decode(raw) if is_json else msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError):
        return raw
    places = _places(value)
    if not places:
        return raw
    holder, name = places[edit.at % len(places)]
    if edit.kind is Kind.NAME and isinstance(holder, dict):
        holder[TEXTS[edit.choice % len(TEXTS)]] = holder.pop(name)
    else:
        holder[name] = VALUES[edit.choice % len(VALUES)]
    try:
        return msgspec.json.encode(value) if is_json else msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, RecursionError, TypeError):
        return raw


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value, breadth first."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop(0)
        names = (
            list(holder)
            if isinstance(holder, dict)
            else range(len(holder))
            if isinstance(holder, list)
            else ()
        )
        for name in names:
            places.append((holder, name))
            waiting.append(holder[name])
    return places
