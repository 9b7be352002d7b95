"""The owner loop and its executor around a node that does what the test says."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from pdcluster_engine.executor import Executor
from pdcluster_engine.inbox import Inbox
from pdcluster_engine.legs import LegTable
from pdcluster_engine.link import Link
from pdcluster_engine.loop import OwnerLoop
from pdcluster_engine.memory.metadata import MetadataRow, MetadataTable, metadata_bytes
from pdcluster_engine.native import NativeEngine
from pdcluster_engine.parts import Parts
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.scheduling.orders import Begin, Work
from pdcluster_engine.submission import Submission
from pdcluster_engine.telemetry import Telemetry
from pdcluster_engine.transport.port import (
    Completed,
    Died,
    DigestRequest,
    Fenced,
    Ready,
    Request,
    TransportEvent,
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
    ResolvePeer,
    Send,
    StartAlone,
    StartDecode,
    StartPrefill,
    StopCompute,
    VerifyRun,
    Write,
)
from pdcluster_protocol.errors import Overloaded, Reason, RequestFailed, TransportError
from pdcluster_protocol.events import (
    ComputeStopped,
    Drained,
    Event,
    Joined,
    LegArrived,
    LegCancelled,
    MessageArrived,
    MetadataRead,
    OperationDone,
    PeerResolved,
    PeerStateChanged,
    Tick,
    TransportLost,
    TransportReady,
)
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import (
    Accepted,
    CancelLeg,
    Concluded,
    Drain,
    DumpRequested,
    Inbound,
    Load,
    PeerChanged,
    PeerState,
    Resolved,
)
from support.greetings import greeting
from support.relay import Port, Relay
from support.sinks import Collected

KEY = Key(5, 6)
ADDRESS = RankAddress("127.0.0.1", 9000)
BOOTSTRAP = RankAddress("127.0.0.1", 8998)


class ScriptedNode:
    """Answers each event with the effects that the test laid down for its type."""

    def __init__(self) -> None:
        self.script: dict[type, list[Effect]] = {}
        self.seen: list[Event] = []
        self.due: float | None = None
        self.changed = threading.Condition()

    def handle(self, event: Event, now: float) -> list[Effect]:
        with self.changed:
            self.seen.append(event)
            if isinstance(event, Tick):
                self.due = None
            self.changed.notify_all()
        return self.script.pop(type(event), [])

    def wait(self, event: Event) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: event in self.seen, timeout=20), self.seen

    def deadline(self) -> float | None:
        return self.due

    def load(self) -> Load:
        return Load(pages_free=7, pages_total=10, pages_quarantined=1, queued=2)

    def dump(self) -> dict[str, object]:
        return {"pages": {"free": 7}}

    def open_keys(self) -> tuple[Key, ...]:
        return (KEY,)


class FakeTransport:
    """Keeps what it is asked, says what the test wants."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: list[TransportEvent] = []
        self.requests: list[Request] = []
        self.calls: list[str] = []
        self.refusal: TransportError | None = None

    def start(self) -> None:
        self.calls.append("start")

    def fileno(self) -> int:
        return self._fd

    def say(self, event: TransportEvent) -> None:
        self._waiting.append(event)
        os.eventfd_write(self._fd, 1)

    def events(self) -> list[TransportEvent]:
        if self._waiting:
            os.eventfd_read(self._fd)
        waiting, self._waiting = self._waiting, []
        return waiting

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)

    def fence(self) -> None:
        self.calls.append("fence")

    def close(self) -> None:
        self.calls.append("close")


class FakeCompute:
    """Takes orders, computes nothing."""

    queued = 3
    active = 4

    def __init__(self) -> None:
        self.begun: list[Begin] = []
        self.stopped: list[Key] = []
        self.room = True

    def begin(self, order: Begin) -> bool:
        if self.room:
            self.begun.append(order)
        return self.room

    def stop(self, key: Key) -> None:
        self.stopped.append(key)


class Bench:
    """All parts of an owner thread with fakes at its borders."""

    def __init__(self, path: str) -> None:
        self.node = ScriptedNode()
        self.transport = FakeTransport()
        self.compute = FakeCompute()
        self.registry = CollectorRegistry()
        self.metadata = MetadataTable(memoryview(bytearray(metadata_bytes(2))), 0, 2)
        self.legs = LegTable(legs_max=2)
        self.inbox = Inbox()
        self.link = Link(path, hello=lambda: greeting(self.link.incarnation), queue_max=10)
        self.parts = Parts(
            legs=self.legs,
            inbox=self.inbox,
            link=self.link,
            transport=self.transport,
            compute=self.compute,
            metadata=self.metadata,
            telemetry=Telemetry(self.registry),
        )
        self.executor = Executor(self.parts, digests=True)
        self.loop = OwnerLoop(self.node, self.parts, executor=self.executor, sequences_max=9)
        self.engine = NativeEngine(inbox=self.inbox, legs=self.legs, loop=self.loop)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except TransportError as error:
            self.failure = error

    def submit(self, key: Key = KEY, rid: str = "r") -> Collected:
        sink = Collected()
        self.engine.submit(submission(key, rid), sink)
        return sink

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def close(self) -> None:
        self.loop.stop()
        if self.thread.is_alive():
            self.thread.join(20)
        assert not self.thread.is_alive()
        self.inbox.close()
        os.close(self.transport.fileno())


def submission(key: Key, rid: str = "r", *, attempt_known: bool = True) -> Submission:
    return Submission(
        key=key,
        rid=rid,
        token_ids=(1, 2),
        sampling=SamplingParameters(),
        output_tokens_max=3,
        bootstrap=BOOTSTRAP,
        attempt_known=attempt_known,
    )


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench("/nonexistent/link")
    yield made
    made.close()


@pytest.fixture
def joined() -> Iterator[tuple[Bench, Port, Relay]]:
    with tempfile.TemporaryDirectory() as folder:
        port = Port(f"{folder}/link", incarnation="inc", address=ADDRESS)
        with Relay({BOOTSTRAP: port}) as relay:
            made = Bench(f"{folder}/link")
            made.thread.start()
            made.loop.open_link()
            made.node.wait(Joined("inc", ADDRESS))
            yield made, port, relay
            made.close()


def until(condition: Callable[[], bool]) -> None:
    """Poll without sleeping: an event that nobody sets is the pause."""
    pause, deadline = threading.Event(), time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


# --- effects -------------------------------------------------------------------------------------


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
    bench.executor.run(ConcludeLeg(KEY, None))
    bench.executor.run(ConcludeLeg(Key(8, 1), Reason.STALLED, "no byte"))
    bench.executor.run(ConcludeLeg(KEY, Reason.ABORTED))
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


# --- the loop ------------------------------------------------------------------------------------


def test_what_http_wants_reaches_the_node_and_followups_come_back(bench: Bench) -> None:
    bench.node.script[LegArrived] = [ReadMetadata(KEY, 0)]
    bench.node.script[MetadataRead] = [ConcludeLeg(KEY, Reason.STALLED, "so it goes")]
    bench.thread.start()
    assert (Reason.STALLED, "so it goes") == bench.submit().end()


def test_cancels_name_exactly_one_leg(bench: Bench) -> None:
    bench.submit()
    bench.thread.start()
    bench.engine.cancel(Key(5, 7), Reason.CLIENT_GONE)
    assert not bench.engine.cancel_rid("", Reason.ABORTED)
    assert not bench.engine.cancel_rid("r2", Reason.ABORTED)
    assert bench.engine.cancel_rid("r", Reason.ABORTED)
    bench.node.wait(LegCancelled(KEY, Reason.ABORTED))
    assert 1 == sum(isinstance(event, LegCancelled) for event in bench.node.seen)


def test_a_drain_refuses_what_is_new(bench: Bench) -> None:
    bench.thread.start()
    bench.engine.drain()
    bench.node.wait(Drained())
    with pytest.raises(RequestFailed) as refused:
        bench.submit()
    assert Reason.SHUTTING_DOWN is refused.value.reason


def test_a_deadline_becomes_a_tick(bench: Bench) -> None:
    bench.node.due = time.monotonic() + 0.02
    bench.thread.start()
    bench.node.wait(Tick())


def test_transport_events_become_the_nodes(bench: Bench) -> None:
    bench.thread.start()
    for event in (
        Ready("s:1", 4096, "v", 1),
        Completed(3, ok=True, digest=9, detail=""),
        Died("gone", 1),
        Fenced(2),
    ):
        bench.transport.say(event)
    bench.node.wait(TransportLost("fenced"))
    expected = [
        TransportReady("s:1", 4096),
        OperationDone(3, ok=True, digest=9),
        TransportLost("gone"),
        TransportLost("fenced"),
    ]
    assert expected == bench.node.seen
    assert 1 == bench.value("pdcluster_transport_restarts_total", cause="death")


def test_a_transport_that_cannot_run_ends_the_thread_with_its_cause(bench: Bench) -> None:
    bench.thread.start()
    bench.transport.say(Died("libfabric.so is missing: apt install it", 1, final=True))
    bench.thread.join(20)
    assert "libfabric.so is missing: apt install it" == str(bench.failure)
    assert "close" == bench.transport.calls[-1]


def test_the_loop_turns_while_nothing_happens_and_shows_its_load(bench: Bench) -> None:
    bench.thread.start()
    until(lambda: bench.engine.state().loops >= 3)
    state = bench.engine.state()
    load = Load(7, 10, 1, queued=5, running=4, sequences_max=9)
    assert (load, False, False, "") == (state.load, state.joined, state.ready, state.incarnation)
    assert 2 == bench.value("pdcluster_pages", state="owned")


def test_messages_of_the_sidecar_become_the_nodes_events(
    joined: tuple[Bench, Port, Relay],
) -> None:
    bench, port, _ = joined
    bench.submit()
    until(lambda: any(isinstance(event, LegArrived) for event in bench.node.seen))
    message = Accepted(KEY, 0)
    for said in (
        Inbound(message, "peer"),
        Resolved("h", 1, None, reason="LayoutMismatch", detail="d"),
        Resolved("h", 2, None, reason="nonsense"),
        PeerChanged("peer", PeerState.DEAD, "gone"),
        CancelLeg("r", None, Reason.CLIENT_GONE),
        CancelLeg("", Key(1, 2), Reason.ABORTED),
        CancelLeg("unknown", None, Reason.ABORTED),
        CancelLeg("", None, Reason.ABORTED),
        Drain(Reason.SHUTTING_DOWN),
    ):
        port.say(said)
    bench.node.wait(Drained(Reason.SHUTTING_DOWN))
    start = bench.node.seen.index(MessageArrived(message, "peer"))
    expected = [
        PeerResolved(RankAddress("h", 1), None, Reason.LAYOUT_MISMATCH, "d"),
        PeerResolved(RankAddress("h", 2), None, Reason.PEER_UNREACHABLE, ""),
        PeerStateChanged("peer", PeerState.DEAD, "gone"),
        LegCancelled(KEY, Reason.CLIENT_GONE),
        LegCancelled(Key(1, 2), Reason.ABORTED),
        Drained(Reason.SHUTTING_DOWN),
    ]
    assert expected == bench.node.seen[start + 1 :]


def test_the_sidecar_gets_messages_questions_pulses_and_dumps(
    joined: tuple[Bench, Port, Relay],
) -> None:
    bench, port, relay = joined
    message = Concluded(KEY, 4)
    bench.node.script[LegArrived] = [Send(ADDRESS, message), ResolvePeer(BOOTSTRAP)]
    bench.submit()
    until(lambda: any(isinstance(event, PeerResolved) for event in bench.node.seen))
    assert [message] == relay.passed
    bench.node.wait(MessageArrived(message, "inc"))
    port.say(DumpRequested(1))
    until(lambda: bool(port.dumps))
    assert b'"pages":{"free":7}' in port.dumps[0]
    relay.wait_load(port, pages_free=7)
    assert 9 == port.load.sequences_max


def test_a_lost_sidecar_is_dialled_again_and_told_the_incarnation(
    joined: tuple[Bench, Port, Relay],
) -> None:
    bench, port, _ = joined
    assert port.peer is not None
    port.peer.shutdown(2)
    until(lambda: 2 == port.hellos)
    assert port.hello is not None
    assert "inc" == port.hello.incarnation
    until(lambda: bench.engine.state().joined)


def test_a_full_inbox_makes_the_model_thread_wait_and_nobody_else() -> None:
    inbox = Inbox(events_max=1)
    inbox.post(Tick())
    inbox.post(Tick())
    waiting = threading.Thread(target=inbox.post_when_room, args=(Drained(),), daemon=True)
    waiting.start()
    assert [Tick(), Tick()] == inbox.drain()
    waiting.join(20)
    assert [Drained()] == inbox.drain()
    inbox.close()
    inbox.post(Tick())
    inbox.post_when_room(Tick())
