"""An owner thread with fakes at its borders: node, transport and model thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from pdcluster_engine.executor import Executor
from pdcluster_engine.inbox import Inbox
from pdcluster_engine.legs import LegTable
from pdcluster_engine.link import Link
from pdcluster_engine.loop import OwnerLoop
from pdcluster_engine.memory.metadata import MetadataTable, RankMetadata, metadata_bytes
from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.native import NativeEngine
from pdcluster_engine.parts import Parts
from pdcluster_engine.ports import RankPort
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.scheduling.orders import Begin
from pdcluster_engine.submission import Submission
from pdcluster_engine.telemetry import Telemetry
from pdcluster_engine.transport.port import (
    Request,
    TransportEvent,
)
from pdcluster_protocol.effects import (
    Effect,
)
from pdcluster_protocol.errors import TransportError
from pdcluster_protocol.events import (
    Event,
    Tick,
)
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import (
    Load,
)
from support.greetings import greeting
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
        self.rooms = 0
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
        return Load(
            pages_free=7, pages_total=10, pages_quarantined=1, rooms_open=self.rooms, queued=2
        )

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

    def __init__(
        self, path: str, *, shared: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node = ScriptedNode()
        self.transport = FakeTransport()
        self.compute = FakeCompute()
        self.registry = CollectorRegistry()
        self.metadata = MetadataTable(HostWindow(memoryview(bytearray(metadata_bytes(2)))), 0, 2)
        self.legs = LegTable(legs_max=2)
        self.inbox = Inbox()
        self.link = Link(path, hello=lambda: greeting(self.link.incarnation), queue_max=10)
        self.parts = Parts(
            legs=self.legs,
            inbox=self.inbox,
            ports=(RankPort(0, self.link, self.transport),),
            compute=self.compute,
            metadata=RankMetadata([self.metadata]),
            telemetry=Telemetry(self.registry),
        )
        self.executor = Executor(self.parts, digests=True)
        self.loop = OwnerLoop(
            self.node,
            self.parts,
            executor=self.executor,
            sequences_max=9,
            shared=shared,
            clock=clock,
        )
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


def until(condition: Callable[[], bool]) -> None:
    """Poll without sleeping: an event that nobody sets is the pause."""
    pause, deadline = threading.Event(), time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)
