"""Prefill's writes: which run goes out next, and what is announced of those that landed.

A window per destination rank keeps few operations under way, so that a cancel drains quickly and
rows that become final meanwhile join into longer runs.

What landed is announced while more is written, so that decode verifies meanwhile; the last runs
ride in the final status, since every message wakes four processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_protocol.effects import CountBytes, Write
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.messages import Accepted, KVPoll, Run, RunsLanded, Status
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.prefill_room import PrefillRoom
from pdcluster_protocol.push.runs import PlannedRun
from pdcluster_protocol.push.sender import SenderState
from pdcluster_protocol.ranks import Lane

ANNOUNCE_BATCH = 8
REPEATED_MESSAGES_MAX = 64
LATE_BYTES_MAX = 1 << 20
"""So much of KV is hashed in no more time than its metadata rows need; it waits for the status."""


class Writing:
    """The operations under way of one prefill node."""

    __slots__ = ("_ledger", "_owners")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._owners: dict[int, tuple[Key, Lane]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def take(self, operation: int) -> tuple[Key, Lane] | None:
        """Whose operation ended; None when it is not (or no longer) one of ours."""
        return self._owners.pop(operation, None)

    def owner(self, operation: int) -> tuple[Key, Lane] | None:
        """Whose operation is under way."""
        return self._owners.get(operation)

    def forget(self, key: Key, lane: Lane) -> None:
        """Completions of this delivery's old operations mean nothing any more."""
        for operation in [n for n, owner in self._owners.items() if owner == (key, lane)]:
            del self._owners[operation]

    def forget_rank(self, rank: int) -> None:
        """The transport of one of our ranks is gone, and no completion of its will come."""
        for operation in [n for n, (_, lane) in self._owners.items() if lane.rank == rank]:
            del self._owners[operation]

    def pump(self, room: PrefillRoom, delivery: Delivery) -> None:
        """Write final rows up to the window, and announce what has landed."""
        window = self._ledger.setup.limits.writes_in_flight_per_peer
        while self._can_write(delivery) and len(delivery.outstanding) < window:
            if delivery.again:
                planned = delivery.again.pop()
                self._ledger.emit(CountBytes("repeat", planned.nbytes * planned.pieces))
            elif delivery.planner is None or (fresh := delivery.planner.next()) is None:
                break
            else:
                planned = fresh
            self._write(room, delivery, planned)
        if delivery.metadata_planned:
            # Nothing but metadata rows is left, and the final status says at once what landed.
            return
        last = room.state is SenderState.FLUSHING and delivery.kv_landed
        if last and sum(run.nbytes for run in delivery.fresh) <= LATE_BYTES_MAX:
            return
        if not delivery.outstanding or len(delivery.fresh) >= ANNOUNCE_BATCH:
            self._announce(room, delivery, delivery.take_fresh())

    def write_metadata(self, room: PrefillRoom, delivery: Delivery) -> None:
        """Write the metadata rows: only after every KV run has landed."""
        wanted = delivery.route.sends_metadata and not delivery.metadata_planned
        if not wanted or not self._can_write(delivery):
            return
        delivery.metadata_planned = True
        own = self._ledger.ranks[delivery.lane.rank]
        table = own.place.metadata
        # Where all rows of a slot lie side by side on both sides, they are one run.
        rows = (table.slot_bytes,) if delivery.destination.slot_bytes else table.rows
        for buffer, row_bytes in enumerate(rows):
            planned = PlannedRun(
                source_region=len(own.place.layout.regions) + buffer,
                source_page=room.slot,
                region=len(delivery.destination.layout.regions) + buffer,
                first_page=delivery.slot,
                pages=1,
                nbytes=row_bytes,
                metadata=True,
            )
            self._write(room, delivery, planned)

    def accept(self, room: PrefillRoom) -> None:
        """Answer the metadata of those that nothing else has answered."""
        assert room.wire_key is not None
        for delivery in room.deliveries.values():
            if not delivery.answered:
                delivery.answered = True
                self._ledger.send(delivery.lane, Accepted(room.wire_key, delivery.lane.rank))

    def publish(self, room: PrefillRoom, *, repeated: bool) -> None:
        """The final status with what is still to be announced; repeated, everything again in turn.

        Not all of it at once where it is much: decode may need longer to verify it than we wait
        before we repeat, and what nobody misses must not fill the queues of the sidecars.
        """
        ledger = self._ledger
        repeats_max = REPEATED_MESSAGES_MAX * ledger.setup.limits.runs_per_message_max
        assert room.wire_key is not None
        for delivery in room.deliveries.values():
            runs = delivery.take_fresh()
            if repeated:
                runs = delivery.take_repeats(repeats_max)
            if len(runs) > ledger.setup.limits.runs_per_status_max:
                self._announce(room, delivery, runs)
                runs = []
            delivery.answered = True
            status = Status(
                key=room.wire_key,
                status=KVPoll.SUCCESS,
                rank=delivery.lane.rank,
                runs=len(delivery.announced),
                landed=tuple(runs),
                epoch=delivery.epoch,
                drained=delivery.drained,
                prompt_tokens=room.leg.prompt_tokens,
                prompt_digest=room.leg.prompt_digest,
                reply_to=ledger.ranks[delivery.lane.rank].address,
            )
            ledger.send(delivery.lane, status)
        ledger.set_clock(Clock.REPEAT, room.key, room.repeat_seconds)
        room.repeat_seconds = min(
            room.repeat_seconds * 2, ledger.setup.limits.retransmit_seconds_max
        )

    def _announce(self, room: PrefillRoom, delivery: Delivery, runs: Sequence[Run]) -> None:
        """Tell decode which runs to verify."""
        size = self._ledger.setup.limits.runs_per_message_max
        assert room.wire_key is not None
        delivery.answered = delivery.answered or bool(runs)
        for start in range(0, len(runs), size):
            self._ledger.send(
                delivery.lane,
                RunsLanded(
                    key=room.wire_key,
                    rank=delivery.lane.rank,
                    epoch=delivery.epoch,
                    runs=tuple(runs[start : start + size]),
                ),
            )

    def _can_write(self, delivery: Delivery) -> bool:
        return self._ledger.ranks[delivery.lane.rank].session is not None

    def _write(self, room: PrefillRoom, delivery: Delivery, planned: PlannedRun) -> None:
        operation = self._ledger.next_operation()
        source, target = self._addresses(delivery, planned)
        self._owners[operation] = (room.key, delivery.lane)
        delivery.outstanding[operation] = planned
        self._ledger.contacts.wrote(delivery.lane.rank, delivery.destination.session)
        self._ledger.emit(
            Write(
                operation=operation,
                target=delivery.destination.session,
                source_offset=source,
                destination_address=target,
                nbytes=planned.nbytes,
                rank=delivery.lane.rank,
                pieces=planned.pieces,
                source_stride=planned.source_stride,
                destination_stride=planned.stride,
            )
        )

    def _addresses(self, delivery: Delivery, planned: PlannedRun) -> tuple[int, int]:
        """(offset in our rank's arena, absolute address in decode's memory) of a run."""
        place, destination = self._ledger.ranks[delivery.lane.rank].place, delivery.destination
        if planned.metadata:
            buffer = planned.source_region - len(place.layout.regions)
            step = destination.slot_bytes or planned.nbytes
            target = destination.buffer_bases[buffer] + planned.first_page * step
            return place.metadata.row_offset(buffer, planned.source_page), target
        pages = self._ledger.setup.page_count
        source = place.layout.page_offset(planned.source_region, planned.source_page, pages)
        item = destination.layout.item_bytes(planned.region)
        target = destination.region_bases[planned.region] + planned.first_page * item
        return source + planned.source_offset, target + planned.offset
