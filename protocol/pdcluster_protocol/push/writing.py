"""Prefill's writes: which run goes out next, and what is announced of those that landed.

A window per destination keeps few operations under way, so that a cancel drains quickly and rows
that become final meanwhile join into longer runs.
"""

from __future__ import annotations

from pdcluster_protocol.effects import CountBytes, Write
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import KVPoll, RunsLanded, Status
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.prefill_room import PrefillRoom
from pdcluster_protocol.push.runs import PlannedRun

ANNOUNCE_BATCH = 8


class Writing:
    """The operations under way of one prefill rank."""

    __slots__ = ("_ledger", "_owners")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._owners: dict[int, tuple[Key, RankAddress]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def take(self, operation: int) -> tuple[Key, RankAddress] | None:
        """Whose operation ended; None when it is not (or no longer) one of ours."""
        return self._owners.pop(operation, None)

    def forget(self, key: Key, reply_to: RankAddress) -> None:
        """Completions of this delivery's old operations mean nothing any more."""
        for operation in [n for n, owner in self._owners.items() if owner == (key, reply_to)]:
            del self._owners[operation]

    def forget_all(self) -> None:
        """The transport is gone, and no completion will come."""
        self._owners.clear()

    def pump(self, room: PrefillRoom, delivery: Delivery) -> None:
        """Write final rows up to the window, and announce what has landed."""
        window = self._ledger.setup.limits.writes_in_flight_per_peer
        while self._ledger.session is not None and len(delivery.outstanding) < window:
            if delivery.again:
                planned = delivery.again.pop()
                self._ledger.emit(CountBytes("repeat", planned.nbytes))
            elif delivery.planner is None or (fresh := delivery.planner.next()) is None:
                break
            else:
                planned = fresh
            self._write(room, delivery, planned)
        if not delivery.outstanding or len(delivery.fresh) >= ANNOUNCE_BATCH:
            self.announce(room, delivery, everything=False)

    def write_metadata(self, room: PrefillRoom, delivery: Delivery) -> None:
        """Write the metadata rows: only after every KV run has landed."""
        if delivery.metadata_planned or self._ledger.session is None:
            return
        delivery.metadata_planned = True
        regions = len(self._ledger.setup.layout.regions)
        for buffer, (_, row_bytes) in enumerate(self._ledger.setup.metadata_buffers):
            planned = PlannedRun(regions + buffer, room.slot, delivery.slot, 1, row_bytes)
            self._write(room, delivery, planned)

    def announce(self, room: PrefillRoom, delivery: Delivery, *, everything: bool) -> None:
        """Tell decode which runs to verify: the fresh ones, or all of them when repeating."""
        delivery.announced += delivery.fresh
        runs = delivery.announced if everything else delivery.fresh
        size = self._ledger.setup.limits.runs_per_message_max
        assert room.wire_key is not None
        for start in range(0, len(runs), size):
            self._ledger.send(
                delivery.reply_to,
                RunsLanded(
                    key=room.wire_key,
                    rank=self._ledger.setup.rank,
                    epoch=delivery.epoch,
                    runs=tuple(runs[start : start + size]),
                ),
            )
        delivery.fresh = []

    def publish(self, room: PrefillRoom, *, repeated: bool) -> None:
        """Announce everything and the final status; repeated until decode concludes."""
        ledger = self._ledger
        assert room.wire_key is not None
        for delivery in room.deliveries.values():
            self.announce(room, delivery, everything=repeated)
            status = Status(
                key=room.wire_key,
                status=KVPoll.SUCCESS,
                rank=ledger.setup.rank,
                runs=len(delivery.announced),
                drained=delivery.drained,
                prompt_tokens=room.leg.prompt_tokens,
                prompt_digest=room.leg.prompt_digest,
                reply_to=ledger.address,
            )
            ledger.send(delivery.reply_to, status)
        ledger.set_clock(Clock.REPEAT, room.key, room.repeat_seconds)
        room.repeat_seconds = min(
            room.repeat_seconds * 2, ledger.setup.limits.retransmit_seconds_max
        )

    def _write(self, room: PrefillRoom, delivery: Delivery, planned: PlannedRun) -> None:
        operation = self._ledger.next_operation()
        source, target = self._addresses(delivery, planned)
        self._owners[operation] = (room.key, delivery.reply_to)
        delivery.outstanding[operation] = planned
        self._ledger.emit(
            Write(
                operation=operation,
                target=delivery.destination.session,
                source_offset=source,
                destination_address=target,
                nbytes=planned.nbytes,
            )
        )

    def _addresses(self, delivery: Delivery, planned: PlannedRun) -> tuple[int, int]:
        """(offset in our arena, absolute address in decode's memory) of a run."""
        setup, destination = self._ledger.setup, delivery.destination
        layout = setup.layout
        if planned.region >= len(layout.regions):
            buffer = planned.region - len(layout.regions)
            offset, row_bytes = setup.metadata_buffers[buffer]
            base = destination.buffer_bases[buffer]
            return offset + planned.source_page * row_bytes, base + planned.first_page * row_bytes
        item = layout.item_bytes(planned.region)
        source = layout.page_offset(planned.region, planned.source_page, setup.page_count)
        return source, destination.region_bases[planned.region] + planned.first_page * item
