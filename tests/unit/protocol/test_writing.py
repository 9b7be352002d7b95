"""Prefill's writes: a window, addresses, announcements, and what becomes of lost ones."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_protocol.effects import Write
from pdcluster_protocol.events import LegArrived
from pdcluster_protocol.ledger import Ledger
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import Accepted, KVPoll, RunsLanded, Status
from pdcluster_protocol.push import writing as writing_module
from pdcluster_protocol.push.delivery import Delivery
from pdcluster_protocol.push.prefill_room import PrefillRoom
from pdcluster_protocol.push.sender import SenderState
from pdcluster_protocol.push.writing import ANNOUNCE_BATCH, LATE_BYTES_MAX, Writing
from support.ledgers import (
    HERE,
    LANE,
    LAYOUT,
    PEER,
    destination,
    joined_ledger,
    key,
    one_rank_route,
    sent,
    whole_planner,
)

SOURCES = tuple(range(12))
# No two neighbours: each page of each region is a run of its own.
TARGETS = tuple(range(15, 3, -1))
OLD = destination("old", region_bases=(100_000, 200_000, 300_000), buffer_bases=(400_000, 500_000))
NEW = destination("new", region_bases=(600_000, 700_000, 800_000), buffer_bases=(900_000, 950_000))
WINDOW = 5
RUNS = 3 * 12


class Bench:
    """A prefill room with one delivery whose whole prompt is computed."""

    def __init__(self) -> None:
        self.ledger: Ledger = joined_ledger(
            limits=Limits(writes_in_flight_per_peer=WINDOW, runs_per_message_max=10)
        )
        self.writing = Writing(self.ledger)
        leg = LegArrived(key(), "rid", 46, "digest", 1, PEER)
        self.room = PrefillRoom(leg, 0.2)
        self.room.slot = 3
        planner = whole_planner(
            LAYOUT, prompt_tokens=46, sources=SOURCES, targets=TARGETS, bytes_max=1 << 20
        )
        for region in range(3):
            planner.rows_written(region, 46)
        self.delivery = Delivery(
            lane=LANE,
            incarnation="i",
            destination=OLD,
            route=one_rank_route(),
            pages=TARGETS,
            slot=2,
            epoch=7,
            planner=planner,
        )
        self.room.deliveries[LANE] = self.delivery
        self.written: list[Write] = []
        self.announced: list[RunsLanded] = []
        self.statuses: list[Status] = []

    def pump(self) -> None:
        self.writing.pump(self.room, self.delivery)
        self.collect()

    def collect(self) -> None:
        effects = self.ledger.take_effects()
        self.written += [effect for effect in effects if isinstance(effect, Write)]
        for to, message in sent(effects):
            assert to == PEER
            if isinstance(message, RunsLanded):
                self.announced.append(message)
            elif isinstance(message, Status):
                self.statuses.append(message)

    def end(self, operation: int, *, ok: bool = True) -> None:
        assert (key(), LANE) == self.writing.take(operation)
        planned = self.delivery.outstanding.pop(operation)
        if ok:
            self.delivery.land(planned, operation)
        else:
            self.delivery.lost.append(planned)

    def land_everything(self) -> None:
        self.pump()
        while self.delivery.outstanding:
            self.end(max(self.delivery.outstanding))
            self.pump()

    def runs(self) -> list[int]:
        return [run.index for message in self.announced for run in message.runs]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_window_bounds_what_is_under_way(bench: Bench) -> None:
    bench.pump()
    assert WINDOW == len(bench.delivery.outstanding) == len(bench.written) == len(bench.writing)
    bench.pump()
    assert WINDOW == len(bench.written)
    bench.end(bench.written[0].operation)
    bench.pump()
    assert WINDOW + 1 == len(bench.written)


def test_a_page_goes_from_its_place_in_our_arena_to_its_place_in_theirs(bench: Bench) -> None:
    bench.land_everything()

    assert RUNS == len(bench.written)
    assert Write(1, "old", LAYOUT.page_offset(0, 0, 16), 100_000 + 15 * 24, 24) == bench.written[0]
    # The last page holds two of the 46 tokens.
    expected = (LAYOUT.page_offset(2, 11, 16), 300_000 + 4 * 12, 6)
    assert expected == (
        bench.written[-1].source_offset,
        bench.written[-1].destination_address,
        bench.written[-1].nbytes,
    )


def test_nothing_is_written_without_a_session(bench: Bench) -> None:
    bench.ledger.ranks[0].session = None
    bench.pump()
    bench.writing.write_metadata(bench.room, bench.delivery)
    bench.collect()

    assert [] == bench.written
    assert not bench.delivery.metadata_planned


def test_runs_are_announced_in_batches_each_once_and_numbered_as_they_landed(
    bench: Bench,
) -> None:
    bench.pump()
    for _ in range(ANNOUNCE_BATCH - 1):
        bench.end(min(bench.delivery.outstanding))
        bench.pump()
    assert [] == bench.announced
    bench.end(max(bench.delivery.outstanding))
    bench.pump()
    assert list(range(ANNOUNCE_BATCH)) == bench.runs()
    bench.land_everything()

    assert list(range(RUNS)) == bench.runs()
    assert bench.delivery.kv_landed
    assert {(key(), 0, 7)} == {(m.key, m.rank, m.epoch) for m in bench.announced}
    operations = sorted(run.digest for message in bench.announced for run in message.runs)
    assert list(range(1, RUNS + 1)) == operations


def test_metadata_rows_go_once_and_to_decodes_slot(bench: Bench) -> None:
    bench.land_everything()
    assert not bench.delivery.landed
    for _ in range(2):
        bench.writing.write_metadata(bench.room, bench.delivery)
    bench.collect()

    assert [
        Write(RUNS + 1, "old", 20000 + 3 * 24, 400_000 + 2 * 16, 16),
        Write(RUNS + 2, "old", 20016 + 3 * 24, 500_000 + 2 * 8, 8),
    ] == bench.written[RUNS:]
    assert not bench.delivery.landed
    bench.end(RUNS + 1)
    bench.end(RUNS + 2)
    assert bench.delivery.landed


def test_rows_that_lie_side_by_side_over_there_too_are_one_write(bench: Bench) -> None:
    bench.land_everything()
    bench.delivery.destination = destination("old", buffer_bases=(400_000, 400_016), slot_bytes=24)
    bench.writing.write_metadata(bench.room, bench.delivery)
    bench.collect()

    assert [Write(RUNS + 1, "old", 20000 + 3 * 24, 400_000 + 2 * 24, 24)] == bench.written[RUNS:]
    bench.end(RUNS + 1)
    assert bench.delivery.landed
    assert (3, 2, 1, 24) == (
        bench.delivery.fresh[-1].region,
        bench.delivery.fresh[-1].first_page,
        bench.delivery.fresh[-1].pages,
        bench.delivery.fresh[-1].nbytes,
    )


def test_publishing_repeats_every_run_in_bounded_messages_and_slows_down(bench: Bench) -> None:
    bench.land_everything()
    bench.announced.clear()
    bench.writing.publish(bench.room, repeated=False)
    bench.collect()
    assert [] == bench.announced
    bench.writing.publish(bench.room, repeated=True)
    bench.collect()

    assert list(range(RUNS)) == bench.runs()
    assert [10, 10, 10, 6] == [len(message.runs) for message in bench.announced]
    expected = Status(
        key(),
        KVPoll.SUCCESS,
        0,
        runs=RUNS,
        epoch=7,
        prompt_tokens=46,
        prompt_digest="digest",
        reply_to=HERE,
    )
    assert [expected] * 2 == bench.statuses
    assert 0.4 == bench.ledger.deadlines.next()
    assert 0.8 == bench.room.repeat_seconds


def test_of_very_many_runs_a_repeat_tells_the_next_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_module, "REPEATED_MESSAGES_MAX", 2)
    bench.land_everything()
    for _ in range(3):
        bench.writing.publish(bench.room, repeated=True)
    bench.collect()
    told = [[run.index for run in status.landed] for status in bench.statuses[-3:]]

    assert [list(range(20)), list(range(20, RUNS)), list(range(20))] == told
    assert [RUNS] * 3 == [status.runs for status in bench.statuses[-3:]]


def last_run(bench: Bench) -> None:
    """The prompt is computed, and all runs but one have landed."""
    bench.room.state = SenderState.FLUSHING
    bench.pump()
    while not bench.delivery.planner or not bench.delivery.planner.complete:
        bench.end(min(bench.delivery.outstanding))
        bench.pump()
    while len(bench.delivery.outstanding) > 1:
        bench.end(min(bench.delivery.outstanding))
        bench.pump()
    bench.announced.clear()
    (last,) = bench.delivery.outstanding
    bench.end(last)


def test_the_last_runs_ride_in_the_status(bench: Bench) -> None:
    last_run(bench)
    bench.pump()
    bench.writing.write_metadata(bench.room, bench.delivery)
    bench.collect()
    for operation in tuple(bench.delivery.outstanding):
        bench.end(operation)
    bench.pump()
    bench.writing.publish(bench.room, repeated=False)
    bench.collect()

    assert [] == bench.announced
    (status,) = bench.statuses
    assert RUNS + 2 == status.runs
    assert list(range(RUNS + 2))[-len(status.landed) :] == [run.index for run in status.landed]
    assert {3, 4} <= {run.region for run in status.landed}
    assert 7 == status.epoch


def test_long_runs_do_not_wait_for_the_metadata_rows(bench: Bench) -> None:
    last_run(bench)
    bench.delivery.fresh[-1] = msgspec.structs.replace(
        bench.delivery.fresh[-1], nbytes=LATE_BYTES_MAX + 1
    )
    bench.pump()

    assert RUNS - 1 == bench.runs()[-1]


def test_metadata_is_answered_once_and_only_where_nothing_else_did(bench: Bench) -> None:
    bench.writing.accept(bench.room)
    bench.writing.accept(bench.room)
    assert [(PEER, Accepted(key(), 0))] == sent(bench.ledger.take_effects())

    bench.delivery.answered = False
    bench.land_everything()
    bench.writing.accept(bench.room)
    assert [] == sent(bench.ledger.take_effects())


def test_a_lost_write_goes_out_again_only_under_a_new_session(bench: Bench) -> None:
    bench.pump()
    bench.end(1, ok=False)
    bench.land_everything()
    assert RUNS == len(bench.written)
    assert not bench.delivery.kv_landed

    bench.delivery.retarget(NEW)
    bench.land_everything()
    assert ("new", 600_000 + 15 * 24) == (
        bench.written[-1].target,
        bench.written[-1].destination_address,
    )
    assert RUNS + 1 == len(bench.written)
    assert bench.delivery.kv_landed
    assert list(range(RUNS)) == bench.runs()


def test_completions_of_the_session_before_mean_nothing(bench: Bench) -> None:
    bench.pump()
    bench.writing.forget(key(), LANE)
    bench.delivery.retarget(NEW)
    bench.pump()

    assert [None] * WINDOW == [bench.writing.take(write.operation) for write in bench.written[:5]]
    assert ["new"] * WINDOW == [write.target for write in bench.written[WINDOW:]]
    again = {write.source_offset for write in bench.written[WINDOW:]}
    assert {write.source_offset for write in bench.written[:WINDOW]} == again


def test_when_our_own_transport_is_gone_nobody_can_say_that_writing_has_stopped(
    bench: Bench,
) -> None:
    bench.pump()
    bench.writing.forget_rank(0)
    bench.delivery.lose_all()

    assert 0 == len(bench.writing)
    assert not bench.delivery.drained
    assert WINDOW == len(bench.delivery.lost)
    bench.delivery.recover()
    bench.land_everything()
    assert not bench.delivery.drained
    assert bench.delivery.kv_landed
    # The peer's memory mapped anew is the proof.
    bench.delivery.retarget(NEW)
    assert bench.delivery.drained


def test_without_anything_under_way_losing_the_transport_leaves_no_doubt(bench: Bench) -> None:
    bench.land_everything()
    bench.delivery.lose_all()

    assert bench.delivery.drained


def test_a_failed_write_reads_our_pages_until_our_transport_or_their_memory_is_gone(
    bench: Bench,
) -> None:
    bench.pump()
    planned = bench.delivery.outstanding.pop(1)
    for end in (bench.delivery.lose_all, lambda: bench.delivery.retarget(NEW)):
        bench.delivery.fail(planned, "refused")
        bench.delivery.recover()
        assert bench.delivery.reading
        end()
        assert not bench.delivery.reading
