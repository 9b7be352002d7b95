"""How decode rooms end: who gets the pages back, when, and what prefill is told.

Before page numbers were sent: at once. While prefill may write: quarantine, ABORT, proof or fence
(order 4). While the model runs: when it has let go.
"""

from __future__ import annotations

from pdcluster_protocol.effects import ConcludeLeg, StopCompute
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.messages import KVPoll
from pdcluster_protocol.push.aborts import Aborts
from pdcluster_protocol.push.decode_room import WRITABLE, DecodeRoom
from pdcluster_protocol.push.receiver import RECEIVER, ReceiverState, ReceiverTrigger
from pdcluster_protocol.ranks import Lane


class DecodeEnds:
    """Ends rooms of one decode node; shares the table of rooms with `DecodeRooms`."""

    __slots__ = ("_aborts", "_ledger", "_rooms")

    def __init__(self, ledger: Ledger, rooms: dict[int, DecodeRoom], aborts: Aborts) -> None:
        self._ledger = ledger
        self._rooms = rooms
        self._aborts = aborts

    def fail(
        self,
        room: DecodeRoom,
        reason: Reason,
        detail: str,
        *,
        provable: bool = True,
        trusted: bool = True,
        stop: bool = True,
    ) -> None:
        """End a room badly, once; one that drains or stops already keeps its first cause.

        `trusted` is False when bytes were said to have landed and are not there: then they may
        still come, and no word of the same writer proves that they will not.
        """
        ledger = self._ledger
        if room.state in (ReceiverState.DRAINING, ReceiverState.STOPPING):
            return
        room.cause = reason
        writable = room.state in WRITABLE
        ledger.queue.remove(room.key)
        ledger.stop_clocks(room.key)
        ledger.emit(ConcludeLeg(room.key, reason, detail))
        ledger.advance(RECEIVER, room, ReceiverTrigger.FAULT, f"{reason}: {detail}")
        if room.state is ReceiverState.FAILED:
            self._aborts.tell(room.key, room.lanes())
            self.close(room, KVPoll.FAILED)
        elif writable:
            ledger.pool.quarantine(room.key, ledger.now, needs_fence=not provable)
            ledger.slots.quarantine(room.key, ledger.now, needs_fence=not provable)
            assert room.card is not None
            self._aborts.begin(
                room.key,
                waiting={
                    (rank, peer.rank): Lane(rank, peer.address)
                    for rank, peers in enumerate(room.prefill_ranks)
                    for peer in peers
                },
                incarnation=room.card.incarnation,
                provable=provable,
                trusted=trusted,
            )
        elif stop:
            ledger.emit(StopCompute(room.key))

    def proven(self, room: DecodeRoom, detail: str = "acknowledged") -> None:
        """Nobody writes to the room's pages any more: they go back."""
        ledger = self._ledger
        self._aborts.end(room.key)
        ledger.pool.absolve(room.key)
        ledger.slots.absolve(room.key)
        ledger.advance(RECEIVER, room, ReceiverTrigger.PROVEN, detail)
        self.close(room, KVPoll.FAILED)

    def close(self, room: DecodeRoom, status: KVPoll) -> None:
        """Forget a room in a terminal state; remember how it ended."""
        ledger = self._ledger
        del self._rooms[room.key.room]
        ledger.stop_clocks(room.key)
        if not room.drained:
            # An earlier write of this key may still land: only a fence frees these pages.
            ledger.pool.quarantine(room.key, ledger.now, needs_fence=True)
            ledger.slots.quarantine(room.key, ledger.now, needs_fence=True)
        else:
            ledger.pool.release(room.key)
            ledger.slots.release(room.key)
        ledger.bury(room.key, status, reason=room.cause)
