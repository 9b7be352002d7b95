"""The owner loop: one thread, one selector, one node.

It waits for the links to the sidecar, for the transports, for the inbox and for the node's own
deadline, turns what happened into events, and lets the executor carry out what the node answers.
Nothing here blocks: forwards run on the model thread, bytes move in the transfer process. So the
loop counter, which the sidecar passes on to peers, stands still only when this thread hangs.

Only this thread touches the node, the transports and the links. Other threads post into the inbox.
"""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections.abc import Callable
from typing import Protocol, assert_never

import msgspec
import structlog

from pdcluster_engine.executor import Executor
from pdcluster_engine.parts import Parts
from pdcluster_engine.ports import RankPort, dropped, queued
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
PARTED_SECONDS = 10.0
"""While it drains: without a sidecar for so long it is not being restarted."""
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
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shared`: the instance has data-parallel ranks in other processes too."""
        self._node = node
        self._executor = executor
        self._shared = shared
        self._instance_done = False
        """No rank of the instance has a room left."""
        self._joined_at = -math.inf
        """When all our ranks last had their links to the sidecar."""
        self._drain_told = (False, False)
        """What the sidecar knows of our drain: whether there is one, whether anything is left."""
        self.done = threading.Event()
        """Set when this engine drains and nobody needs it any more."""
        self._ports = parts.ports
        self._inbox = parts.inbox
        self._legs = parts.legs
        self._compute = parts.compute
        self._telemetry = parts.telemetry
        self._sequences_max = sequences_max
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._loops = 0
        self._pulse_at = 0.0
        self._link_dropped = 0
        self._stopping = False
        self._link_wanted = False
        self.snapshot = Snapshot()
        self._telemetry.show_loads(lambda: self.snapshot.load)

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
        for port in self._ports:
            port.open(self._selector)
        try:
            while not self._stopping:
                self._turn()
        finally:
            for port in self._ports:
                port.close()
            self._selector.close()

    def _turn(self) -> None:
        ready = {key.fd for key, _ in self._selector.select(self._timeout(self._clock()))}
        now = self._clock()
        self._loops += 1
        for port in self._ports:
            self._serve(port, ready, now)
        if self._inbox.fileno() in ready:
            for event in self._inbox.drain():
                self._handle(event, now)
        deadline = self._node.deadline()
        if deadline is not None and deadline <= now:
            self._handle(Tick(), now)
        # Peers wait for what the turn has to say, and nobody for what is told of it.
        for port in self._ports:
            port.link.flush(now)
        self._publish(now)
        for port in self._ports:
            port.link.flush(now)
            port.watch_link(self._selector)

    def _serve(self, port: RankPort, ready: set[int], now: float) -> None:
        """What one rank's link and transport bring."""
        if self._link_wanted:
            port.link.open(now)
        port.link.dial_if_due(now)
        if port.link.fileno() in ready:
            for message in port.link.receive(now):
                self._handle_message(port, message, now)
        # A transport has events that no descriptor tells of; asking costs little.
        for occurrence in port.transport.events():
            self._handle_transport(port, occurrence, now)

    def _timeout(self, now: float) -> float:
        links = (port.link.deadline() for port in self._ports)
        deadlines = (self._pulse_at, self._node.deadline(), *links)
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

    def _handle_message(self, port: RankPort, message: SidecarToEngine, now: float) -> None:
        match message:
            case HelloAnswer(incarnation, address):
                log.info("joined", incarnation=incarnation, rank=port.index, peer=str(address))
                # A new sidecar takes us for idle and ready until it hears the truth.
                self._pulse_at = now
                self._handle(Joined(incarnation, address, port.index), now)
            case Inbound(inner, incarnation):
                self._handle(MessageArrived(inner, incarnation, port.index), now)
            case Resolved():
                self._handle(_resolution(message), now)
            case PeerChanged(incarnation, state, detail):
                self._handle(PeerStateChanged(incarnation, state, detail), now)
            case CancelLeg():
                self._cancel(port, message, now)
            case DumpRequested(request):
                port.link.send(DumpAnswered(request, self._dump()))
            case Drain():
                self._drain(message, now)
            case _:
                assert_never(message)

    def _drain(self, order: Drain, now: float) -> None:
        """Said again and again while the instance drains; the first one counts, and the last."""
        self._instance_done = order.done
        if not self._legs.draining:
            self._legs.draining = True
            self._handle(Drained(order.reason), now)

    def _cancel(self, port: RankPort, order: CancelLeg, now: float) -> None:
        """An exact key, else an exact rid; nothing else matches."""
        if port.index != 0:
            # The sidecar tells all ranks; a leg belongs to all of them and is ended once.
            return
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
            "link": {"queued": queued(self._ports), "dropped": dropped(self._ports)},
        }
        return msgspec.json.encode(description, enc_hook=str)

    # --- the transport ----------------------------------------------------------------------------

    def _handle_transport(self, port: RankPort, occurrence: TransportEvent, now: float) -> None:
        match occurrence:
            case Completed(operation, ok, digest, detail):
                self._handle(OperationDone(operation, ok, digest, detail), now)
            case Ready(session_name, base_address):
                port.transport_ready = True
                self._handle(TransportReady(session_name, base_address, port.index), now)
            case Fenced():
                self._lost(port, "fence", "fenced", now)
            case Died(detail, _, final):
                if final:
                    raise TransportError(detail)
                log.warning("transport_died", reason=str(Reason.TRANSFER_FAILED), detail=detail)
                self._lost(port, "death", detail, now)
            case _:
                assert_never(occurrence)

    def _lost(self, port: RankPort, cause: str, detail: str, now: float) -> None:
        port.transport_ready = False
        self._telemetry.transport_restarts.labels(cause).inc()
        self._handle(TransportLost(detail, port.index), now)

    # --- what others see --------------------------------------------------------------------------

    def _publish(self, now: float) -> None:
        load = self._node.load()
        draining = self._legs.draining
        empty = draining and load.rooms_open == 0 and len(self._legs) == 0
        load = msgspec.structs.replace(
            load,
            queued=load.queued + self._compute.queued,
            running=self._compute.active,
            sequences_max=self._sequences_max,
        )
        joined = all(port.joined for port in self._ports)
        self.snapshot = Snapshot(
            loops=self._loops,
            load=load,
            incarnation=self._ports[0].link.incarnation,
            joined=joined,
            transport_ready=all(port.transport_ready for port in self._ports),
        )
        if joined:
            self._joined_at = now
        # Without a sidecar nobody can say whether another rank has a room left.
        parted = now >= self._joined_at + PARTED_SECONDS
        if empty and (self._instance_done or parted or not self._shared):
            self.done.set()
        if now < self._pulse_at and self._drain_told == (draining, empty):
            return
        self._drain_told = (draining, empty)
        self._pulse_at = now + PULSE_SECONDS
        self._telemetry.loops.set(self._loops)
        self._telemetry.link_joined.set(joined)
        self._telemetry.queue.labels("link").set(queued(self._ports))
        self._telemetry.queue.labels("inbox").set(len(self._inbox))
        lost = dropped(self._ports) - self._link_dropped
        if lost > 0:
            self._telemetry.dropped.labels("link_queue_full").inc(lost)
            self._link_dropped += lost
        pulse = Pulse(self._loops, load, rooms=len(self._node.open_keys()), draining=draining)
        for port in self._ports:
            if port.joined:
                port.link.send(pulse)


def _resolution(message: Resolved) -> PeerResolved:
    bootstrap = RankAddress(message.host, message.port)
    if message.card is not None:
        return PeerResolved(bootstrap, message.card)
    known = message.reason in Reason.__members__.values()
    reason = Reason(message.reason) if known else Reason.PEER_UNREACHABLE
    return PeerResolved(bootstrap, None, reason, message.detail)
