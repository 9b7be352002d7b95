"""Cancels that wait for proof: which ranks must say that they have stopped, and who did.

The set of ranks whose ACK is required for a key is the set that was given its addresses, stored
with the key. SGLang's *generation* is a count of cancels of this process: an ACK of another one,
or of another incarnation of the instance, proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import Abort, AbortAck, RankCard


class PendingAbort(msgspec.Struct, kw_only=True):
    """One cancelled key."""

    generation: int
    incarnation: str
    ranks: dict[int, RankCard]
    """The ranks that have not answered yet, by unique rank."""
    repeat_seconds: float
    drained: bool = True


class Aborts:
    """Cancels under way of one decode rank; each belongs to a room that drains."""

    __slots__ = ("_generation", "_ledger", "_pending")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: dict[Key, PendingAbort] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._pending)

    def tell(self, key: Key, ranks: tuple[RankCard, ...]) -> None:
        """Nothing was published for this key: tell prefill to forget it, ask for no proof."""
        if self._ledger.address is None:
            return
        for rank in ranks:
            self._ledger.send(rank.address, Abort(key, self._ledger.address))

    def begin(
        self, key: Key, *, ranks: Mapping[int, RankCard], incarnation: str, provable: bool
    ) -> None:
        """Ask every rank, named by its unique rank, for proof; `provable` False: none can come."""
        limits, timeouts = self._ledger.setup.limits, self._ledger.setup.timeouts
        self._generation += 1
        self._pending[key] = PendingAbort(
            generation=self._generation,
            incarnation=incarnation,
            ranks=dict(ranks),
            repeat_seconds=limits.retransmit_seconds_min,
        )
        self._ledger.set_clock(Clock.ABORT, key, timeouts.abort_seconds)
        if provable:
            self.repeat(key)

    def repeat(self, key: Key) -> None:
        """Send the ABORT to the ranks that have not answered."""
        pending = self._pending.get(key)
        if pending is None or self._ledger.address is None:
            return
        for rank in pending.ranks.values():
            message = Abort(key, self._ledger.address, pending.generation)
            self._ledger.send(rank.address, message)
        self._ledger.set_clock(Clock.REPEAT, key, pending.repeat_seconds)
        limit = self._ledger.setup.limits.retransmit_seconds_max
        pending.repeat_seconds = min(pending.repeat_seconds * 2, limit)

    def acknowledged(self, key: Key, ack: AbortAck, incarnation: str) -> bool:
        """Note one rank's ACK; True when every rank has drained."""
        pending = self._pending.get(key)
        if (
            pending is None
            or ack.generation != pending.generation
            or incarnation != pending.incarnation
        ):
            self._ledger.count("abort_ack_stale")
            return False
        pending.ranks.pop(ack.rank, None)
        pending.drained = pending.drained and ack.drained
        if pending.ranks:
            return False
        if not pending.drained:
            self.unprovable(key)
        return pending.drained

    def unprovable(self, key: Key) -> None:
        """No acknowledgement will come (in time): the owner of the memory must fence."""
        ledger = self._ledger
        ledger.stop_clocks(key, (Clock.REPEAT, Clock.ABORT))
        ledger.pool.quarantine(key, ledger.now, needs_fence=True)
        ledger.slots.quarantine(key, ledger.now, needs_fence=True)

    def end(self, key: Key) -> None:
        """Proof has come."""
        self._pending.pop(key, None)
        self._ledger.stop_clocks(key, (Clock.REPEAT, Clock.ABORT))
