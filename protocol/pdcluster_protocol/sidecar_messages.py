"""What sidecars say to each other beside what they relay: that they live, or an engine died."""

from __future__ import annotations

import msgspec


class Ping(msgspec.Struct, frozen=True, tag="PD_PING"):
    """Every second: my incarnation, and the loop counter of each of my ranks."""

    incarnation: str
    loops: tuple[int, ...]
    draining: bool = False


class InstanceDied(msgspec.Struct, frozen=True, tag="PD_DIED"):
    """My engine is gone: every room of this incarnation ends now."""

    incarnation: str
    detail: str = ""


SidecarMessage = Ping | InstanceDied
