"""Finding the wedge: a peer that lives and that this engine of the library can reach no more.

After a queue overflow every write to that peer fails when its admission has waited for exactly one
second, for ever; only a new engine helps. A dead peer has the same second between two attempts to
connect, and so has one whose new process drew the port of the old one, until its metadata is read
again. So several writes in a row must fail that way, each handed over after the end of the one
before, and the peer must accept a connection.
"""

from __future__ import annotations

import socket

from pdcluster_engine.transport.contact import TARGETS_MAX

FAILED_SECONDS = (0.95, 1.05)
FAILURES = 3
CONNECT_SECONDS = 0.25


class WedgeWatch:
    """Per peer, failures in a row that look like the wedge."""

    __slots__ = ("_suspicions",)

    def __init__(self) -> None:
        self._suspicions: dict[str, tuple[int, float]] = {}
        """How many, and when the latest one ended."""

    def landed(self, target: str) -> None:
        """A write to that peer was applied."""
        if self._suspicions:
            self._suspicions.pop(target, None)

    def failed(self, target: str, *, started: float, ended: float) -> bool:
        """A write to that peer failed; whether the peer is wedged."""
        count, latest = self._suspicions.get(target, (0, started))
        if not FAILED_SECONDS[0] <= ended - started <= FAILED_SECONDS[1]:
            self._suspicions.pop(target, None)
            return False
        if started < latest:
            return False
        if len(self._suspicions) >= TARGETS_MAX:
            self._suspicions.clear()
        self._suspicions[target] = (count + 1, ended)
        return count + 1 >= FAILURES and _accepts(target)


def _accepts(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            return True
    except OSError:
        return False
