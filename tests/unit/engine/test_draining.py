"""A drain as the owner thread sees it: what it tells the sidecar, and when the engine may end."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pdcluster_engine import loop as loop_module
from pdcluster_protocol.effects import ConcludeLeg
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import Drained, Joined, LegArrived, LegCancelled
from pdcluster_protocol.messages import Drain, Load
from support.owner import ADDRESS, BOOTSTRAP, KEY, Bench, until
from support.relay import Port, Relay

BEGUN = Drain(Reason.SHUTTING_DOWN)
DONE = Drain(Reason.SHUTTING_DOWN, done=True)


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def joined(*, shared: bool) -> Iterator[tuple[Bench, Port]]:
    with tempfile.TemporaryDirectory() as folder:
        port = Port(f"{folder}/link", incarnation="inc", address=ADDRESS)
        with Relay({BOOTSTRAP: port}):
            # Its clock stands still, so no pulse comes because its time has come.
            made = Bench(f"{folder}/link", shared=shared, clock=lambda: 7.0)
            made.thread.start()
            made.loop.open_link()
            made.node.wait(Joined("inc", ADDRESS))
            until(lambda: made.engine.state().joined)
            yield made, port
            made.close()


def waits(bench: Bench) -> bool:
    """Whether the engine still waits after some turns of its loop."""
    for _ in range(3):
        turned_to = bench.loop.snapshot.loops + 1
        bench.inbox.wake()
        until(partial(_has_turned, bench, turned_to))
    return not bench.loop.done.is_set()


def test_the_sidecar_hears_at_once_that_it_drains_and_that_nothing_is_left(
    joined: tuple[Bench, Port],
) -> None:
    bench, port = joined
    bench.node.rooms = 1
    bench.submit()
    bench.node.wait(arrival(bench))
    bench.engine.drain()
    until(lambda: port.draining)
    assert waits(bench)

    bench.node.rooms = 0
    bench.node.script[LegCancelled] = [ConcludeLeg(KEY, Reason.ABORTED, "")]
    assert bench.engine.cancel_rid("r", Reason.ABORTED)
    until(lambda: port.load == Load(7, 10, 1, queued=5, running=4, sequences_max=9))
    assert 0 == len(bench.legs)


def _has_turned(bench: Bench, turns: int) -> bool:
    return bench.loop.snapshot.loops >= turns


def arrival(bench: Bench) -> LegArrived:
    until(lambda: any(isinstance(event, LegArrived) for event in bench.node.seen))
    return next(event for event in bench.node.seen if isinstance(event, LegArrived))


def test_a_rank_that_shares_its_instance_stays_until_no_rank_has_a_room(
    joined: tuple[Bench, Port], *, shared: bool
) -> None:
    bench, port = joined
    bench.engine.drain()
    bench.node.wait(Drained())
    if shared:
        assert waits(bench)
        port.say(BEGUN)
        assert waits(bench)
        port.say(DONE)
    assert bench.loop.done.wait(20)
    assert [Drained()] == [event for event in bench.node.seen if isinstance(event, Drained)]


def test_one_whose_sidecar_stays_away_waits_for_no_other(
    joined: tuple[Bench, Port], monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    bench, port = joined
    assert port.peer is not None
    Path(port.listener.getsockname()).unlink()
    port.peer.shutdown(2)
    until(lambda: not bench.engine.state().joined)
    bench.engine.drain()
    # It may be restarting, and other ranks may have rooms.
    assert waits(bench) == shared
    monkeypatch.setattr(loop_module, "PARTED_SECONDS", 0.0)
    assert bench.loop.done.wait(20)


def test_what_does_not_end_in_time_is_cut_with_the_reason(joined: tuple[Bench, Port]) -> None:
    bench, _ = joined
    sink = bench.submit()
    bench.node.wait(arrival(bench))
    bench.engine.drain(seconds=0.01)
    cancel = LegCancelled(KEY, Reason.SHUTTING_DOWN, "too long")
    bench.node.script[LegCancelled] = [ConcludeLeg(KEY, cancel.reason, cancel.detail)]
    cutting = threading.Thread(target=bench.engine.cut, args=("too long", 20.0), daemon=True)
    cutting.start()

    assert (Reason.SHUTTING_DOWN, "too long") == sink.end()
    cutting.join(20)
    assert not cutting.is_alive()
    bench.node.wait(cancel)
