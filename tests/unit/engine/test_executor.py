"""Effects to actions, one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from pdcluster_engine.legs import Leg
from pdcluster_engine.memory.metadata import MetadataRow
from pdcluster_engine.scheduling.orders import Work
from pdcluster_engine.submission import Output
from pdcluster_engine.transport.port import (
    DigestRequest,
    WriteRequest,
)
from pdcluster_protocol.effects import (
    ClearMetadata,
    ConcludeLeg,
    Count,
    CountBytes,
    Effect,
    Fence,
    ReadMetadata,
    StartAlone,
    StartDecode,
    StartPrefill,
    StopCompute,
    VerifyRun,
    Write,
)
from pdcluster_protocol.errors import Overloaded, Reason, TransportError
from pdcluster_protocol.events import (
    ComputeStopped,
    MetadataRead,
    OperationDone,
)
from pdcluster_protocol.ids import Key
from support.owner import KEY, Bench, submission
from support.sinks import Collected


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench("/nonexistent/link")
    yield made
    made.close()


def test_transfers_go_to_the_transport(bench: Bench) -> None:
    for effect in (Write(1, "peer", 10, 20, 30), VerifyRun(2, 40, 50), Fence("why", 3)):
        bench.executor.run(effect)
    assert [WriteRequest(1, "peer", 10, 20, 30, True), DigestRequest(2, 40, 50)] == (
        bench.transport.requests
    )
    assert ["fence"] == bench.transport.calls


def test_a_refused_operation_is_one_that_failed(bench: Bench) -> None:
    bench.transport.refusal = TransportError("too many")
    bench.executor.run(VerifyRun(2, 40, 50))
    assert [OperationDone(2, ok=False, detail="too many")] == list(bench.executor.followups)


@pytest.mark.parametrize(
    ("effect", "work", "slot"),
    [
        (StartPrefill(KEY, (1, 2), 1), Work.PREFILL, 1),
        (StartDecode(KEY, (1, 2), 0), Work.DECODE, 0),
        (StartAlone(KEY, (1, 2)), Work.ALONE, None),
    ],
    ids=["prefill", "decode", "alone"],
)
def test_computations_go_to_the_model_thread_with_their_leg(
    bench: Bench, effect: Effect, work: Work, slot: int | None
) -> None:
    bench.submit()
    bench.executor.run(effect)
    (order,) = bench.compute.begun
    assert (KEY, work, (1, 2), slot) == (order.key, order.work, order.pages, order.slot)
    assert bench.legs.find(KEY) is order.leg
    bench.executor.run(StopCompute(KEY))
    assert [KEY] == bench.compute.stopped


def test_a_computation_without_leg_or_room_stops_at_once(bench: Bench) -> None:
    bench.executor.run(StartAlone(KEY, (1,)))
    bench.submit()
    bench.compute.room = False
    bench.executor.run(StartAlone(KEY, (1,)))
    reasons = [event.reason for event in bench.executor.followups if type(event) is ComputeStopped]
    assert [Reason.ABORTED, Reason.OVERLOADED] == reasons


def test_metadata_is_read_and_cleared(bench: Bench) -> None:
    bench.metadata.write(1, MetadataRow(token=3, room=5))
    for effect in (ReadMetadata(KEY, 1), ClearMetadata(1), ReadMetadata(KEY, 1)):
        bench.executor.run(effect)
    assert [MetadataRead(KEY, 5), MetadataRead(KEY, 0)] == list(bench.executor.followups)


def test_a_conclusion_ends_the_leg_once_and_frees_room_and_rid(bench: Bench) -> None:
    good, bad = bench.submit(), bench.submit(Key(8, 1), "other")
    with pytest.raises(Overloaded):
        bench.submit(Key(9, 1), "third")
    with capture_logs() as lines:
        bench.executor.run(ConcludeLeg(KEY, None))
        bench.executor.run(ConcludeLeg(Key(8, 1), Reason.STALLED, "no byte"))
        bench.executor.run(ConcludeLeg(KEY, Reason.ABORTED))
    assert [("concluded", "pair", 8, "Stalled")] == [
        (line["event"], line["leg"], line["room"], line["reason"]) for line in lines[1:]
    ]
    assert [(None, ""), (Reason.STALLED, "no byte")] == [good.end(), bad.end()]
    assert 0 == len(bench.legs)
    bench.submit()


def test_counts_become_metrics(bench: Bench) -> None:
    bench.executor.run(Count("stale"))
    bench.executor.run(CountBytes("kv", 4096))
    assert 1 == bench.value("pdcluster_dropped_total", what="stale")
    assert 4096 == bench.value("pdcluster_kv_bytes_total", kind="kv")


def test_a_leg_without_attempt_takes_the_one_that_the_node_minted(bench: Bench) -> None:
    bench.legs.add(submission(Key(5, 0), attempt_known=False), Collected())
    minted = Key(5, 77)
    leg = bench.legs.find(minted)
    assert leg is not None
    assert minted == leg.key
    assert bench.legs.find(Key(5, 78)) is None
    assert bench.legs.find_submitted(Key(5, 0)) is leg


def test_nothing_follows_the_end_of_a_leg_whatever_threads_do() -> None:
    sink = Collected()
    leg = Leg(submission(KEY), sink)
    output = Output(token_id=1, text="a", logprob=0.0, top_logprobs=())
    leg.emit(output)
    leg.end(Reason.ABORTED, "left")
    leg.emit(output)
    leg.end(None, "")
    assert ([output], [(Reason.ABORTED, "left")]) == (sink.outputs, sink.ends)
