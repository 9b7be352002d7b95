"""The owner loop: one thread, one selector, one node.

It waits for the link to the sidecar, for the transport, for the inbox and for the node's own
deadline, turns what happened into events, and lets the executor carry out what the node answers.
Nothing here blocks: forwards run on the model thread, bytes move in the transfer process. So the
loop counter, which the sidecar passes on to peers, stands still only when this thread hangs.

Only this thread touches the node, the transport and the link. Other threads post into the inbox.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Protocol, assert_never

import msgspec
import structlog

from pdcluster_engine.executor import Executor
from pdcluster_engine.link import LinkState
from pdcluster_engine.parts import Parts
from pdcluster_engine.transport.port import Completed, Died, Fenced, Ready, TransportEvent
from pdcluster_protocol.effects import Effect
from pdcluster_protocol.errors import Reason, TransportError
from pdcluster_protocol.events import (
    Drained,
    Event,
    Joined,
    LegCancelled,
    MessageArrived,
    OperationDone,
    PeerResolved,
    PeerStateChanged,
    Tick,
    TransportLost,
    TransportReady,
)
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import (
    CancelLeg,
    Drain,
    DumpAnswered,
    DumpRequested,
    HelloAnswer,
    Inbound,
    Load,
    PeerChanged,
    Pulse,
    Resolved,
    SidecarToEngine,
)

PULSE_SECONDS = 0.5
"""The loop turns at least this often, so a counter that stands still for 2 s means a hang."""
_FOLLOWUPS_MAX = 100_000
"""A node that answers an event with itself for ever is a bug, not a wait."""

log = structlog.get_logger()


class Node(Protocol):
    """What the loop needs of a prefill or decode node."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about an event; a peer's fault never raises."""

    def deadline(self) -> float | None:
        """Latest time for the next `Tick`."""

    def load(self) -> Load:
        """What the rank can still take."""

    def dump(self) -> dict[str, object]:
        """Rooms, ranks and pages, for people."""

    def open_keys(self) -> tuple[Key, ...]:
        """All keys with a room here."""


class Snapshot(msgspec.Struct, frozen=True):
    """What other threads may know of the loop; replaced as a whole, so it needs no lock."""

    loops: int = 0
    load: Load = Load()
    incarnation: str = ""
    joined: bool = False
    transport_ready: bool = False


class OwnerLoop:
    """The body of the owner thread; `stop` and `open_link` may be called from any thread."""

    def __init__(
        self,
        node: Node,
        parts: Parts,
        *,
        executor: Executor,
        sequences_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._executor = executor
        self._link = parts.link
        self._transport = parts.transport
        self._inbox = parts.inbox
        self._legs = parts.legs
        self._compute = parts.compute
        self._telemetry = parts.telemetry
        self._sequences_max = sequences_max
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._watched: tuple[int, int] | None = None
        """Descriptor and events under which the link is registered."""
        self._loops = 0
        self._pulse_at = 0.0
        self._link_dropped = 0
        self._stopping = False
        self._link_wanted = False
        self._transport_ready = False
        self.snapshot = Snapshot()

    def open_link(self) -> None:
        """From now on dial the sidecar: this engine can serve."""
        self._link_wanted = True
        self._inbox.wake()

    def stop(self) -> None:
        """End after the running turn."""
        self._stopping = True
        self._inbox.wake()

    def run(self) -> None:
        """The thread's body, until `stop`.

        Raises:
            LinkRefused: the sidecar does not want this rank.
            TransportError: the transport cannot run on this machine.
        """
        self._selector.register(self._inbox.fileno(), selectors.EVENT_READ)
        self._selector.register(self._transport.fileno(), selectors.EVENT_READ)
        self._transport.start()
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._link.close()
            self._transport.close()
            self._selector.close()

    def _turn(self) -> None:
        self._selector.select(self._timeout(self._clock()))
        now = self._clock()
        self._loops += 1
        if self._link_wanted:
            self._link.open(now)
        self._link.dial_if_due(now)
        # Asking all three costs less than keeping track of which one woke us.
        for message in self._link.receive(now):
            self._handle_message(message, now)
        for occurrence in self._transport.events():
            self._handle_transport(occurrence, now)
        for event in self._inbox.drain():
            self._handle(event, now)
        deadline = self._node.deadline()
        if deadline is not None and deadline <= now:
            self._handle(Tick(), now)
        self._publish(now)
        self._link.flush(now)
        self._watch_link()

    def _timeout(self, now: float) -> float:
        deadlines = (self._pulse_at, self._node.deadline(), self._link.deadline())
        due = min(deadline for deadline in deadlines if deadline is not None)
        return min(max(due - now, 0.0), PULSE_SECONDS)

    def _handle(self, event: Event, now: float) -> None:
        """One event and all that follows from it at once."""
        followups = self._executor.followups
        followups.append(event)
        for _ in range(_FOLLOWUPS_MAX):
            if not followups:
                return
            for effect in self._node.handle(followups.popleft(), now):
                self._executor.run(effect)
        message = f"one event led to more than {_FOLLOWUPS_MAX} others"
        raise RuntimeError(message)

    # --- the sidecar ------------------------------------------------------------------------------

    def _handle_message(self, message: SidecarToEngine, now: float) -> None:
        match message:
            case HelloAnswer(incarnation, address):
                log.info("joined", incarnation=incarnation, peer=str(address))
                self._handle(Joined(incarnation, address), now)
            case Inbound(inner, incarnation):
                self._handle(MessageArrived(inner, incarnation), now)
            case Resolved():
                self._handle(_resolution(message), now)
            case PeerChanged(incarnation, state, detail):
                self._handle(PeerStateChanged(incarnation, state, detail), now)
            case CancelLeg():
                self._cancel(message, now)
            case DumpRequested(request):
                self._link.send(DumpAnswered(request, self._dump()))
            case Drain(reason):
                self._legs.draining = True
                self._handle(Drained(reason), now)
            case _:
                assert_never(message)

    def _cancel(self, order: CancelLeg, now: float) -> None:
        """An exact key, else an exact rid; nothing else matches."""
        key = order.key
        if key is None:
            leg = self._legs.find_rid(order.rid) if order.rid else None
            key = None if leg is None else leg.key
        if key is None:
            self._telemetry.dropped.labels("cancel_of_unknown").inc()
            return
        self._handle(LegCancelled(key, order.reason), now)

    def _dump(self) -> bytes:
        description = {
            **self._node.dump(),
            "loops": self._loops,
            "legs": len(self._legs),
            "compute": {"queued": self._compute.queued, "active": self._compute.active},
            "link": {"queued": self._link.queued, "dropped": self._link.dropped},
        }
        return msgspec.json.encode(description, enc_hook=str)

    # --- the transport ----------------------------------------------------------------------------

    def _handle_transport(self, occurrence: TransportEvent, now: float) -> None:
        match occurrence:
            case Completed(operation, ok, digest, detail):
                self._handle(OperationDone(operation, ok, digest, detail), now)
            case Ready(session_name, base_address):
                self._transport_ready = True
                self._handle(TransportReady(session_name, base_address), now)
            case Fenced():
                self._lost("fence", "fenced", now)
            case Died(detail, _, final):
                if final:
                    raise TransportError(detail)
                log.warning("transport_died", reason=str(Reason.TRANSFER_FAILED), detail=detail)
                self._lost("death", detail, now)
            case _:
                assert_never(occurrence)

    def _lost(self, cause: str, detail: str, now: float) -> None:
        self._transport_ready = False
        self._telemetry.transport_restarts.labels(cause).inc()
        self._handle(TransportLost(detail), now)

    # --- what others see --------------------------------------------------------------------------

    def _publish(self, now: float) -> None:
        load = self._node.load()
        load = msgspec.structs.replace(
            load,
            queued=load.queued + self._compute.queued,
            running=self._compute.active,
            sequences_max=self._sequences_max,
        )
        joined = self._link.state is LinkState.JOINED
        self.snapshot = Snapshot(
            loops=self._loops,
            load=load,
            incarnation=self._link.incarnation,
            joined=joined,
            transport_ready=self._transport_ready,
        )
        self._telemetry.show_load(load)
        if now < self._pulse_at:
            return
        self._pulse_at = now + PULSE_SECONDS
        self._telemetry.loops.set(self._loops)
        self._telemetry.link_joined.set(joined)
        self._telemetry.queue.labels("link").set(self._link.queued)
        self._telemetry.queue.labels("inbox").set(len(self._inbox))
        if self._link.dropped > self._link_dropped:
            lost = self._link.dropped - self._link_dropped
            self._telemetry.dropped.labels("link_queue_full").inc(lost)
            self._link_dropped = self._link.dropped
        if joined:
            self._link.send(Pulse(self._loops, load, rooms=len(self._node.open_keys())))

    def _watch_link(self) -> None:
        """Register what the link waits for; between two connections a turn sees none."""
        descriptor = self._link.fileno()
        wanted: tuple[int, int] | None = None
        if descriptor >= 0:
            events = selectors.EVENT_READ | (self._link.wants_write and selectors.EVENT_WRITE)
            wanted = (descriptor, events)
        if wanted == self._watched:
            return
        if self._watched is not None:
            self._selector.unregister(self._watched[0])
        if wanted is not None:
            self._selector.register(*wanted)
        self._watched = wanted


def _resolution(message: Resolved) -> PeerResolved:
    bootstrap = RankAddress(message.host, message.port)
    if message.card is not None:
        return PeerResolved(bootstrap, message.card)
    known = message.reason in Reason.__members__.values()
    reason = Reason(message.reason) if known else Reason.PEER_UNREACHABLE
    return PeerResolved(bootstrap, None, reason, message.detail)
