"""The last word of prefill to decode after a bad end, repeated until it is taken or out of date.

A lost Failed status is SGLang's 300 s hang. The room itself is closed without waiting for this: the
farewell needs no page.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import KVPoll, Status
from pdcluster_protocol.ranks import Lane

REPEATS_MAX = 8
DETAIL_LENGTH_MAX = 400


class Farewell(msgspec.Struct):
    """One status and who must hear it."""

    lanes: tuple[Lane, ...]
    status: Status
    """Each of our ranks says it with its own number and address."""
    repeat_seconds: float
    repeats: int = 0


class Farewells:
    """Failed statuses that decode has not taken yet; bounded by `limits.rooms_max`."""

    __slots__ = ("_by_key", "_ledger")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_key: dict[Key, Farewell] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def waiting_keys(self) -> tuple[Key, ...]:
        """Keys whose last word is still repeated."""
        return tuple(self._by_key)

    def say(self, key: Key, lanes: tuple[Lane, ...], *, reason: str, detail: str) -> None:
        """Send a Failed status now and repeat it."""
        ledger = self._ledger
        limits = ledger.setup.limits
        if key not in self._by_key and len(self._by_key) >= limits.rooms_max:
            self.stop(next(iter(self._by_key)))
        status = Status(
            key=key,
            status=KVPoll.FAILED,
            rank=0,
            reason=reason,
            detail=detail[:DETAIL_LENGTH_MAX],
        )
        farewell = Farewell(lanes, status, limits.retransmit_seconds_min)
        self._by_key[key] = farewell
        self._send(key, farewell)

    def stop(self, key: Key) -> None:
        """Decode has taken it, or nobody is left to take it."""
        if self._by_key.pop(key, None) is not None:
            self._ledger.stop_clocks(key, (Clock.FAREWELL,))

    def due(self, key: Key) -> None:
        """Say it again, a bounded number of times."""
        farewell = self._by_key.get(key)
        if farewell is None:
            return
        farewell.repeats += 1
        if farewell.repeats > REPEATS_MAX:
            self._ledger.count("farewell_unheard")
            self.stop(key)
            return
        self._send(key, farewell)

    def _send(self, key: Key, farewell: Farewell) -> None:
        for lane in farewell.lanes:
            address = self._ledger.ranks[lane.rank].address
            status = msgspec.structs.replace(farewell.status, rank=lane.rank, reply_to=address)
            self._ledger.send(lane, status)
        self._ledger.set_clock(Clock.FAREWELL, key, farewell.repeat_seconds)
        farewell.repeat_seconds = min(
            farewell.repeat_seconds * 2, self._ledger.setup.limits.retransmit_seconds_max
        )
