"""Cancels that wait for proof: which ranks must say that they have stopped, and who did.

The set of ranks whose ACK is required for a key is the set that was given its addresses, stored
with the key. SGLang's *generation* is a count of cancels of this process: an ACK of another one,
or of another incarnation of the instance, proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import Abort, AbortAck
from pdcluster_protocol.ranks import Lane


class PendingAbort(msgspec.Struct, kw_only=True):
    """One cancelled key."""

    generation: int
    incarnation: str
    waiting: dict[tuple[int, int], Lane]
    """Who has not answered yet, by our rank that asked and the unique rank that was asked."""
    repeat_seconds: float
    drained: bool = True


class Aborts:
    """Cancels under way of one decode node; each belongs to a room that drains."""

    __slots__ = ("_generation", "_ledger", "_pending")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: dict[Key, PendingAbort] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._pending)

    def tell(self, key: Key, lanes: Iterable[Lane]) -> None:
        """Nothing was published for this key: tell prefill to forget it, ask for no proof."""
        for lane in lanes:
            self._send(key, lane, None)

    def begin(
        self,
        key: Key,
        *,
        waiting: Mapping[tuple[int, int], Lane],
        incarnation: str,
        provable: bool,
        trusted: bool = True,
    ) -> None:
        """Ask every rank that was given addresses for proof; `provable` False: none can come.

        Without `trusted` an ACK says that prefill has stopped, and only a fence is proof.
        """
        limits, timeouts = self._ledger.setup.limits, self._ledger.setup.timeouts
        self._generation += 1
        self._pending[key] = PendingAbort(
            generation=self._generation,
            incarnation=incarnation,
            waiting=dict(waiting),
            repeat_seconds=limits.retransmit_seconds_min,
            drained=trusted,
        )
        self._ledger.set_clock(Clock.ABORT, key, timeouts.abort_seconds)
        if provable:
            self.repeat(key)

    def repeat(self, key: Key) -> None:
        """Send the ABORT to the ranks that have not answered."""
        pending = self._pending.get(key)
        if pending is None or self._ledger.ranks[0].address is None:
            return
        for lane in pending.waiting.values():
            self._send(key, lane, pending.generation)
        self._ledger.set_clock(Clock.REPEAT, key, pending.repeat_seconds)
        limit = self._ledger.setup.limits.retransmit_seconds_max
        pending.repeat_seconds = min(pending.repeat_seconds * 2, limit)

    def acknowledged(self, key: Key, ack: AbortAck, incarnation: str, rank: int) -> bool:
        """Note an ACK to one of our ranks; True when every rank has drained."""
        pending = self._pending.get(key)
        if (
            pending is None
            or ack.generation != pending.generation
            or incarnation != pending.incarnation
        ):
            self._ledger.count("abort_ack_stale")
            return False
        pending.waiting.pop((rank, ack.rank), None)
        pending.drained = pending.drained and ack.drained
        if pending.waiting:
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

    def _send(self, key: Key, lane: Lane, generation: int | None) -> None:
        address = self._ledger.ranks[lane.rank].address
        if address is not None:
            self._ledger.send(lane, Abort(key, address, generation))
