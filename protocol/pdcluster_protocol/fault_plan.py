"""Which faults a transport is to inject into its writes: for tests, chosen by one text.

    seed=7,late=0.2,FlippedByte=0.05,EarlyCompletion=0.05

`seed` must stand there, `late` (seconds) may, and each fault has its share of the writes; the
shares add up to 1 at most. The operator checks the text before anything starts, and the engine
reads it again: both use this module, so they cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from pdcluster_protocol.errors import ConfigError

FILE_MARK: Final = "@"
"""Before the path of a file that holds the text and may be replaced while the engine runs."""
LATE_SECONDS_MAX: Final = 60.0
TEXT_LENGTH_MAX: Final = 1000

_WHOLE = re.compile(r"\d{1,18}", re.ASCII)
_DECIMAL = re.compile(r"\d{1,6}(\.\d{1,9})?", re.ASCII)


class Fault(StrEnum):
    """What can be wrong with a write."""

    DROP = "Drop"
    """It is not sent and never answered."""
    DELAY = "Delay"
    """Its answer is held back."""
    REORDER = "Reorder"
    """It is sent behind the next one."""
    DUPLICATE = "Duplicate"
    """It is sent twice, and answered twice."""
    LATE_WRITE = "LateWrite"
    """It is sent late and answered when it has landed: a cancel comes before."""
    TRUNCATED_RUN = "TruncatedRun"
    """Its answer is ok with the right digest, but only its first half was sent."""
    FLIPPED_BYTE = "FlippedByte"
    """Its answer is ok with the right digest, but one landed byte is wrong."""
    EARLY_COMPLETION = "EarlyCompletion"
    """Its answer is ok with the right digest, before it is sent."""
    ERROR_THEN_WRITE = "ErrorThenWrite"
    """Its answer says failed, and then it is sent."""


class FaultPlan(msgspec.Struct, frozen=True):
    """How often each fault happens to a write."""

    seed: int
    shares: Mapping[Fault, float]
    late_seconds: float = 0.05
    """How long what is late is late."""

    def __post_init__(self) -> None:
        total = sum(self.shares.values())
        if not total <= 1:
            raise ConfigError(f"the shares of faults add up to {total:g}; at most 1")
        if not 0 < self.late_seconds <= LATE_SECONDS_MAX:
            raise ConfigError(
                f"late is {self.late_seconds:g} s; above 0, at most {LATE_SECONDS_MAX:g}"
            )


def parse_fault_plan(text: str, *, field: str) -> FaultPlan:
    """Read a plan strictly.

    Raises:
        ConfigError: naming the field, the part and what it may be.
    """
    if len(text) > TEXT_LENGTH_MAX:
        raise ConfigError(f"{field} has {len(text)} characters; at most {TEXT_LENGTH_MAX}")
    parts: dict[str, str] = {}
    for part in text.strip().split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{field}: {part!r} is no NAME=NUMBER")
        if name in parts:
            raise ConfigError(f"{field}: {name} stands twice; keep one")
        parts[name] = value
    if "seed" not in parts:
        raise ConfigError(f"{field} has no seed; write seed=1 to let the same faults come again")
    seed = _number(_WHOLE, "seed", parts.pop("seed"), field)
    late = _number(_DECIMAL, "late", parts.pop("late", "0.05"), field)
    shares = {_fault(name, field): _number(_DECIMAL, name, parts[name], field) for name in parts}
    try:
        return FaultPlan(int(seed), shares, late)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error.detail}") from error


def require_faults(text: str, *, field: str) -> None:
    """Refuse what is neither empty, nor a plan, nor the path of a file with one.

    Raises:
        ConfigError: naming the field, the value and what it may be.
    """
    if text == FILE_MARK:
        raise ConfigError(f"{field} is {text!r}; a path must follow")
    if text and not text.startswith(FILE_MARK):
        parse_fault_plan(text, field=field)


def _fault(name: str, field: str) -> Fault:
    try:
        return Fault(name)
    except ValueError:
        known = ", ".join(Fault)
        raise ConfigError(
            f"{field}: {name!r} is no fault; seed, late and these are: {known}"
        ) from None


def _number(pattern: re.Pattern[str], name: str, value: str, field: str) -> float:
    if not pattern.fullmatch(value):
        raise ConfigError(f"{field}: {name} is {value!r}; it must be a plain number, such as 0.25")
    return float(value)
