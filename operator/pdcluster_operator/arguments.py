"""The `args` of a role with engine `native`: a few flags, each refused by name when it is wrong.

    --mode exact|batched   one forward per request, or one for all decoding requests
    --chunk N              prompt tokens per forward
    --pages N              pages of the pool; absent: the engine sizes it
    --sequences N          decoding sequences at most
    --device cpu|cuda[:N]  where model and KV pages live

Three more are for tests; the first two change neither bytes nor tokens, the third breaks writes:

    --scatter-seed N       hand out scattered pages, shuffled by this seed, instead of long runs
    --check-invariants     check the whole node after every event; a violation ends the engine
    --faults PLAN|@FILE    let the transport lie, such as `seed=7,FlippedByte=0.05`

A flag may be written `--chunk 64` (two items) or `--chunk=64`. Abbreviations are not understood, so
a flag that the API owns cannot slip by under a shorter name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from pdcluster_protocol.config import require_device_name
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.fault_plan import require_faults

COUNT_MAX = 1 << 31
SWITCHES = {"--check-invariants"}
"""Flags that have no value."""


class NativeArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What `args` may say about a native engine."""

    mode: Literal["exact", "batched"] = "batched"
    chunk: int = 256
    pages: int = 0
    sequences: int = 16
    device: str = "cpu"
    scatter_seed: int | None = None
    check_invariants: bool = False
    faults: str = ""


def parse_native_arguments(args: Sequence[str], *, field: str) -> NativeArguments:
    """Read `args`; `field` is its path in the spec, for messages.

    Raises:
        ConfigError: an unknown or repeated flag, a flag without a value, a value out of range.
    """
    values: dict[str, object] = {}
    for flag, value in _pairs(args, field):
        name = flag.removeprefix("--").replace("-", "_")
        if name in values:
            raise ConfigError(f"{field}: {flag} stands twice; keep one")
        values[name] = _value(flag, value, name=name, field=field)
    return msgspec.convert(values, NativeArguments)


def _pairs(args: Sequence[str], field: str) -> Iterator[tuple[str, str]]:
    items = iter(args)
    for item in items:
        flag, equals, value = item.partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{field}: {item!r} is no flag; flags begin with --")
        if flag in SWITCHES:
            if equals:
                raise ConfigError(f"{field}: {flag} has a value; write {flag} alone")
        elif not equals:
            try:
                value = next(items)
            except StopIteration:
                raise ConfigError(f"{field}: {flag} has no value; write {flag}=VALUE") from None
        yield flag, value


def _value(flag: str, value: str, *, name: str, field: str) -> object:
    """What a flag's value means."""
    match name:
        case "mode":
            if value not in {"exact", "batched"}:
                raise ConfigError(f"{field}: --mode is {value!r}; it is exact or batched")
            return value
        case "chunk" | "pages" | "sequences" | "scatter_seed":
            return _count(flag, value, field)
        case "device":
            require_device_name(value, field=f"{field}: {flag}")
            return value
        case "faults":
            require_faults(value, field=f"{field}: {flag}")
            return value
        case "check_invariants":
            return True
        case _:
            raise ConfigError(
                f"{field}: {flag!r} is unknown to engine native; it knows --mode, --chunk,"
                " --pages, --sequences, --device, --scatter-seed, --check-invariants, --faults"
            )


def _count(flag: str, value: str, field: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:12]) <= COUNT_MAX:
        raise ConfigError(f"{field}: {flag} is {value!r}; it must be a whole number from 1 up")
    return int(value)
