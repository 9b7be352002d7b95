"""What the owner thread asks of the model thread."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdcluster_engine.legs import Leg
from pdcluster_protocol.ids import Key


class Work(StrEnum):
    """What a computation is for."""

    PREFILL = "prefill"
    """Compute the prompt, hand its rows over, leave the first token in a metadata slot."""
    DECODE = "decode"
    """The prompt's rows have arrived; produce tokens from the first one on."""
    ALONE = "alone"
    """Both, here."""


class Begin(msgspec.Struct, frozen=True):
    """Start a computation in pages that its key owns."""

    key: Key
    leg: Leg
    work: Work
    pages: tuple[int, ...]
    slot: int | None
    """The metadata slot that carries the first token; None when computed alone."""


class Stop(msgspec.Struct, frozen=True):
    """Let go of a key's pages; answered by `ComputeStopped` whether or not it ran."""

    key: Key


class Shutdown(msgspec.Struct, frozen=True):
    """End the model thread after the running forward."""


Order = Begin | Stop | Shutdown
