"""Events of the model thread wait for the device, and nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pdcluster_engine.memory.finality import FinalityGate
from pdcluster_protocol.errors import PDClusterError, Reason
from pdcluster_protocol.events import ComputeStopped, Event, PromptComputed, RowsWritten
from pdcluster_protocol.ids import Key

KEY = Key(5, 6)
ROWS = RowsWritten(KEY, 0, 0, 64)


class FakeMark:
    """A point that the device reaches when the test says so."""

    def __init__(self) -> None:
        self.reached = False
        self.asked = threading.Event()
        self.failure: RuntimeError | None = None

    def query(self) -> bool:
        self.asked.set()
        if self.failure is not None:
            raise self.failure
        return self.reached


class Bench:
    """A gate whose device belongs to the test."""

    def __init__(self, *, mark_seconds: float = 20.0) -> None:
        self.marks: list[FakeMark] = []
        self.passed: list[Event] = []
        self.changed = threading.Condition()
        self.gate = FinalityGate(
            self._record, self._pass_on, events_max=4, mark_seconds=mark_seconds
        )
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def wait_passed(self, *events: Event) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.passed) >= len(events), timeout=20)
        assert list(events) == self.passed

    def wait_failure(self) -> BaseException:
        self.thread.join(20)
        assert self.failure is not None
        return self.failure

    def _record(self) -> FakeMark:
        self.marks.append(FakeMark())
        return self.marks[-1]

    def _pass_on(self, event: Event) -> None:
        with self.changed:
            self.passed.append(event)
            self.changed.notify_all()

    def _run(self) -> None:
        try:
            self.gate.run()
        except (PDClusterError, RuntimeError) as error:
            self.failure = error


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.thread.start()
    yield made
    made.gate.shut_down()
    made.thread.join(20)
    assert not made.thread.is_alive()


def test_rows_are_told_when_the_device_has_written_them_and_not_before(bench: Bench) -> None:
    bench.gate.post(ROWS)
    assert bench.marks[0].asked.wait(20)
    assert [] == bench.passed
    bench.marks[0].reached = True
    bench.wait_passed(ROWS)


def test_order_is_kept_and_pages_are_let_go_behind_the_writes_into_them(bench: Bench) -> None:
    events = (ROWS, PromptComputed(KEY), ComputeStopped(KEY))
    for event in events:
        bench.gate.post(event)
    # A stream reaches its marks in order; a gate that looked at the last one only would lie.
    bench.marks[1].reached = bench.marks[2].reached = True
    assert bench.marks[0].asked.wait(20)
    assert [] == bench.passed
    bench.marks[0].reached = True
    bench.wait_passed(*events)


def test_a_full_gate_makes_the_model_thread_wait_and_lets_it_go_on(bench: Bench) -> None:
    for _ in range(4):
        bench.gate.post(ROWS)
    last = ComputeStopped(KEY)
    model = threading.Thread(target=bench.gate.post, args=(last,), daemon=True)
    model.start()
    assert bench.marks[0].asked.wait(20)
    assert 4 == len(bench.gate)
    for mark in bench.marks[:4]:
        mark.reached = True
    model.join(20)
    assert not model.is_alive()
    bench.marks[4].reached = True
    bench.wait_passed(ROWS, ROWS, ROWS, ROWS, last)


def test_a_device_that_failed_fails_the_thread(bench: Bench) -> None:
    bench.gate.post(ROWS)
    bench.marks[0].failure = RuntimeError("illegal access")
    assert "illegal access" in str(bench.wait_failure())
    assert [] == bench.passed


def test_a_device_that_hangs_fails_the_thread() -> None:
    bench = Bench(mark_seconds=0.01)
    bench.thread.start()
    bench.gate.post(ROWS)
    failure = bench.wait_failure()
    assert isinstance(failure, PDClusterError)
    assert Reason.MODEL_FAILED is failure.reason


def test_what_is_not_true_at_the_end_is_never_said(bench: Bench) -> None:
    bench.gate.post(ROWS)
    assert bench.marks[0].asked.wait(20)
    bench.gate.shut_down()
    bench.thread.join(20)
    assert not bench.thread.is_alive()
    assert [] == bench.passed
