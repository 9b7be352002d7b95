"""The owner loop around a node that does what the test says."""

from __future__ import annotations

import selectors
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from pdcluster_engine.inbox import Inbox
from pdcluster_engine.transport.port import (
    Completed,
    Died,
    Fenced,
    Ready,
)
from pdcluster_protocol.effects import (
    ConcludeLeg,
    ReadMetadata,
    ResolvePeer,
    Send,
)
from pdcluster_protocol.errors import Reason, RequestFailed
from pdcluster_protocol.events import (
    Drained,
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
from support.owner import ADDRESS, BOOTSTRAP, KEY, Bench, until
from support.relay import Port, Relay


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


def test_the_inbox_wakes_a_selector_once_and_again_after_it_was_drained() -> None:
    inbox = Inbox()
    with selectors.DefaultSelector() as selector:
        selector.register(inbox.fileno(), selectors.EVENT_READ)
        assert [] == selector.select(0)
        for _ in range(2):
            inbox.post(Tick())
            inbox.post(Tick())
            assert 1 == len(selector.select(0))
            assert [Tick(), Tick()] == inbox.drain()
            assert [] == selector.select(0)
    inbox.close()
