"""Identities: what names a room, an attempt, a process and a rank.

A *room* is SGLang's 63-bit `bootstrap_room`. Room numbers may come again; a `Key(room, attempt)`
never does. The *attempt* is 64 bits: 42 of milliseconds and 22 random, so attempts are ordered in
time and an unknown key older than a node's watermark is dead without any table.

Entropy and time are arguments: this module mints nothing by itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

Room = NewType("Room", int)
Attempt = NewType("Attempt", int)
RequestId = NewType("RequestId", str)
Incarnation = NewType("Incarnation", str)
"""Random per start of an instance (the set of ranks that serve as one engine)."""
Session = NewType("Session", str)
"""Random per start of one process: MAC counters and transport names live and die with it."""

ROOM_MAX = (1 << 63) - 1
ROOM_UNWRITTEN = 0
"""SGLang's metadata slots use room 0 for "not written yet"; it is never minted."""
ATTEMPT_MAX = (1 << 64) - 1
ATTEMPT_RANDOM_BITS = 22


class Role(StrEnum):
    """What a pod does; a leg is named after the role that serves it."""

    PREFILL = "prefill"
    DECODE = "decode"


class Key(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The exact name of one attempt of one sequence; carried by every message, page and run."""

    room: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.room}.{self.attempt}"


class RankAddress(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Where one rank's control messages are received: the ZMQ PULL socket of its sidecar."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def mint_room(entropy: int, *, dp_size: int, dp_rank: int) -> Room:
    """A room in [1, 2^63 - 1] with `room % dp_size == dp_rank`; `entropy` is 63 random bits.

    Raises:
        ValueError: when `dp_rank` is no rank of `dp_size`.
    """
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank {dp_rank} is not in [0, {dp_size})")
    room = (entropy & ROOM_MAX) // dp_size * dp_size + dp_rank
    if room > ROOM_MAX:
        room -= dp_size
    return Room(room if room != ROOM_UNWRITTEN else dp_size)


def mint_attempt(unix_milliseconds: int, entropy: int) -> Attempt:
    """An attempt of 42 bits of wall-clock milliseconds and 22 random bits."""
    random_bits = entropy & ((1 << ATTEMPT_RANDOM_BITS) - 1)
    return Attempt(((unix_milliseconds << ATTEMPT_RANDOM_BITS) | random_bits) & ATTEMPT_MAX)


def attempt_milliseconds(attempt: int) -> int:
    """The wall-clock milliseconds inside an attempt."""
    return attempt >> ATTEMPT_RANDOM_BITS
