"""What the owner thread works with, wired once at start and never changed."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdcluster_engine.inbox import Inbox
from pdcluster_engine.legs import LegTable
from pdcluster_engine.memory.metadata import RankMetadata
from pdcluster_engine.ports import RankPort
from pdcluster_engine.scheduling.orders import Begin
from pdcluster_engine.telemetry import Telemetry
from pdcluster_protocol.ids import Key


class Compute(Protocol):
    """What the owner thread sees of the model thread; nothing here waits for a forward."""

    @property
    def queued(self) -> int:
        """Sequences that wait for their turn."""

    @property
    def active(self) -> int:
        """Prompts and answers under way."""

    def begin(self, order: Begin) -> bool:
        """Take a computation; False when no more can be taken."""

    def stop(self, key: Key) -> None:
        """Let go of a key's pages."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The owner thread's neighbours and tables."""

    legs: LegTable
    inbox: Inbox
    ports: tuple[RankPort, ...]
    """By unique rank."""
    compute: Compute
    metadata: RankMetadata
    telemetry: Telemetry
