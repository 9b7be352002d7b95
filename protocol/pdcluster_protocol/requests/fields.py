"""Typed access to the fields of one JSON object; every error names field, value and fix."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from pdcluster_protocol.errors import InvalidRequest, Reason
from pdcluster_protocol.undecodable import UNDECODABLE

FieldT = TypeVar("FieldT")

SHOWN_BYTES_MAX = 60


class Interval(msgspec.Struct, frozen=True):
    """The numbers that a field may have, and the words for an error.

    Bounds of integers are integers: 2^63 - 1 has no float of its own.
    """

    low: int | float
    high: int | float = math.inf
    low_open: bool = False

    def holds(self, number: int | float) -> bool:
        """Whether the number lies inside; never true for NaN."""
        above = number > self.low if self.low_open else number >= self.low
        return above and number <= self.high

    @property
    def words(self) -> str:
        """For instance `in (0, 1]`."""
        if self.high == math.inf:
            return f"above {self.low}" if self.low_open else f"at least {self.low}"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}]"


class Fields:
    """One JSON object, values still raw; a value `null` counts as absent."""

    __slots__ = ("prefix", "raw")

    def __init__(self, raw: dict[str, msgspec.Raw], *, prefix: str = "") -> None:
        self.raw = raw
        self.prefix = prefix

    def path(self, name: str) -> str:
        """The field's name as the client wrote it, for instance `sampling_params.top_p`."""
        return f"{self.prefix}{name}"

    def has(self, name: str) -> bool:
        raw = self.raw.get(name)
        return raw is not None and not (len(raw) == 4 and bytes(raw) == b"null")

    def first_byte(self, name: str) -> bytes:
        """The first byte of the value: `"`, `[`, `{`, a digit, ..."""
        return memoryview(self.raw[name])[:1].tobytes()

    def refusal(self, name: str, must: str, *, reason: Reason | None = None) -> InvalidRequest:
        """The error for a present field: its name, its value and what it must be."""
        path = self.path(name)
        shown = shown_value(self.raw[name])
        return InvalidRequest(f"{path} is {shown}; it must {must}", field=path, reason=reason)

    def value(self, name: str, kind: type[FieldT], must: str) -> FieldT | None:
        """The field decoded as `kind`; None when it is absent."""
        if not self.has(name):
            return None
        try:
            return msgspec.json.decode(self.raw[name], type=kind)
        except UNDECODABLE as error:
            raise self.refusal(name, must) from error

    def boolean(self, name: str) -> bool:
        """The field as a boolean; absent is false."""
        return name in self.raw and bool(self.value(name, bool, "be true or false"))

    def string(self, name: str) -> str | None:
        return self.value(name, str, "be a string")

    def integer(self, name: str, allowed: Interval) -> int | None:
        if name not in self.raw:
            # Most fields are absent, and the words for an error take longer than to see that.
            return None
        number = self.value(name, int, f"be an integer {allowed.words}")
        if number is not None and not allowed.holds(number):
            raise self.refusal(name, f"be {allowed.words}")
        return number

    def number(self, name: str, allowed: Interval) -> float | None:
        if name not in self.raw:
            return None
        number = self.value(name, float, f"be a number {allowed.words}")
        if number is not None and not allowed.holds(number):
            raise self.refusal(name, f"be {allowed.words}")
        return number

    def nested(self, name: str) -> Fields:
        """A field that is itself an object; absent is an empty one."""
        raw = self.value(name, dict[str, msgspec.Raw], "be an object")
        return Fields(raw or {}, prefix=f"{self.path(name)}.")


def decode_object(body: bytes) -> Fields:
    """The outermost object of a body.

    Raises:
        InvalidRequest: the body is no JSON object, or not UTF-8.
    """
    try:
        if not body.isascii():
            body.decode()
        return Fields(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"the body is {shown_value(body)}; it must be a JSON object"
        ) from error
    except UNDECODABLE as error:
        raise InvalidRequest(f"the body is not JSON ({error}); send one JSON object") from error


def shown_value(raw: bytes | msgspec.Raw) -> str:
    """A value as the client wrote it, cut to a length that fits into an error."""
    text = memoryview(raw)[: SHOWN_BYTES_MAX + 1].tobytes()
    shown = text[:SHOWN_BYTES_MAX].decode(errors="replace")
    return f"{shown}..." if len(text) > SHOWN_BYTES_MAX else shown
