"""What must hold of a node between any two events; `check` raises when it does not.

Cheap enough to run after every event of every test, and at idle in production.
"""

from __future__ import annotations

from pdcluster_protocol.alone import AloneRoom, AloneState
from pdcluster_protocol.errors import InvariantViolated
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.nodes import Node
from pdcluster_protocol.push.decode_room import WRITABLE, DecodeRoom
from pdcluster_protocol.push.decode_rooms import DecodeRooms
from pdcluster_protocol.push.prefill_room import PrefillRoom
from pdcluster_protocol.push.prefill_rooms import PrefillRooms
from pdcluster_protocol.push.receiver import ReceiverState
from pdcluster_protocol.push.sender import SenderState

HOLDING_SENDER = (
    SenderState.COMPUTING,
    SenderState.FLUSHING,
    SenderState.PUBLISHED,
    SenderState.DRAINING,
)
HOLDING_RECEIVER = (*WRITABLE, ReceiverState.RUNNING, ReceiverState.STOPPING)


def check(node: Node) -> None:
    """Assert everything that must hold.

    Raises:
        InvariantViolated: naming the key and what is wrong.
    """
    ledger = node.ledger
    ledger.pool.check()
    ledger.slots.check()
    for view in node.views():
        match view:
            case PrefillRoom():
                _prefill_room(ledger, view)
            case DecodeRoom():
                _decode_room(ledger, view)
            case AloneRoom():
                _alone_room(ledger, view)
            case _:
                raise InvariantViolated(f"an unknown kind of room: {view!r}", key=view.key)
    _no_orphans(node)
    _bounded(node)


def check_idle(node: Node) -> None:
    """Assert that nothing is left of requests that have ended.

    Raises:
        InvariantViolated: naming what is left.
    """
    check(node)
    ledger = node.ledger
    left = {
        "rooms": len(node.views()),
        "queued": len(ledger.queue),
        "pages": ledger.pool.size - ledger.pool.free_count,
        "slots": ledger.slots.size - ledger.slots.free_count,
        "waiting": node.side.waiting_count(),
        "deadlines": len(ledger.deadlines),
    }
    if any(left.values()):
        raise InvariantViolated(f"an idle node still has {left}")


def _prefill_room(ledger: Ledger, room: PrefillRoom) -> None:
    holds = ledger.pool.holds(room.key)
    expected = room.state in HOLDING_SENDER
    if holds is not expected:
        _fail(room.key, f"{room.state} and {'' if holds else 'no '}pages")
    if room.state is SenderState.BOOTSTRAPPING and any(
        d.outstanding or d.announced for d in room.deliveries.values()
    ):
        _fail(room.key, "bytes were written before all page numbers were known (order 1)")
    if room.state is SenderState.PUBLISHED and not all(d.landed for d in room.deliveries.values()):
        _fail(room.key, "published before the last byte landed (order 3)")
    if room.state is SenderState.DRAINING and not (
        room.computing or any(d.outstanding for d in room.deliveries.values())
    ):
        _fail(room.key, "drained but not closed")
    _has_clock(ledger, room.key)


def _decode_room(ledger: Ledger, room: DecodeRoom) -> None:
    holds = ledger.pool.holds(room.key)
    quarantined = ledger.pool.is_quarantined(room.key)
    if room.state is ReceiverState.DRAINING:
        if not (holds and quarantined):
            _fail(room.key, "draining without quarantined pages (order 4)")
    elif room.state in HOLDING_RECEIVER:
        if not holds or quarantined:
            _fail(room.key, f"{room.state} without pages of its own (order 2)")
    elif holds:
        _fail(room.key, f"{room.state} holds pages")
    if room.state is ReceiverState.RUNNING and not room.complete:
        _fail(room.key, "decoding what was not verified (order 3)")
    waits = room.state not in (ReceiverState.RUNNING, ReceiverState.STOPPING)
    if waits and not (room.state is ReceiverState.DRAINING and ledger.pool.awaits_fence(room.key)):
        _has_clock(ledger, room.key)


def _alone_room(ledger: Ledger, room: AloneRoom) -> None:
    if ledger.pool.holds(room.key) is not (room.state is not AloneState.ADMITTING):
        _fail(room.key, f"{room.state} and pages do not agree")


def _no_orphans(node: Node) -> None:
    """Pages and queue entries have rooms, except pages that wait for a fence or are condemned."""
    ledger = node.ledger
    keys = {view.key for view in node.views()}
    for key in ledger.pool.held_keys():
        if key not in keys and not (ledger.pool.awaits_fence(key) or ledger.pool.is_condemned(key)):
            _fail(key, "pages without a room")
    for key in ledger.queue.waiting_keys():
        if key not in keys:
            _fail(key, "queued without a room")
    _no_stray_clocks(node, keys)


def _no_stray_clocks(node: Node, keys: set[Key]) -> None:
    """Every clock belongs to a room or to what waits outside rooms, and that has one."""
    ledger, roomless = node.ledger, _roomless(node)
    for name in ledger.deadlines.names():
        if name[1] not in keys and name not in roomless:
            _fail(name[1], f"a {name[0]} clock runs without a room")
    for clock, key in roomless:
        if not ledger.deadlines.has((clock, key)):
            _fail(key, f"it waits without a {clock} deadline")


def _roomless(node: Node) -> set[tuple[Clock, Key]]:
    """What waits outside rooms, each with the clock that ends its wait."""
    side = node.side
    if not isinstance(side, PrefillRooms):
        return set()
    early = {(Clock.EARLY, key) for key in side.pairing.waiting_keys()}
    return early | {(Clock.FAREWELL, key) for key in side.farewells.waiting_keys()}


def _bounded(node: Node) -> None:
    limits = node.ledger.setup.limits
    for what, count, bound in (
        ("rooms", len(node.views()), limits.rooms_max),
        ("tombstones", node.ledger.tombstone_count, limits.tombstones_max),
        ("waiting", node.side.waiting_count(), limits.waiting_rooms_max + limits.rooms_max),
    ):
        if count > bound:
            raise InvariantViolated(f"{count} {what}; the bound is {bound}")
    if isinstance(node.side, DecodeRooms):
        draining = sum(r.state is ReceiverState.DRAINING for r in node.side.rooms.values())
        if len(node.side.aborts) != draining:
            raise InvariantViolated(f"{len(node.side.aborts)} aborts for {draining} rooms")


def _has_clock(ledger: Ledger, key: Key) -> None:
    if not any(ledger.deadlines.has((clock, key)) for clock in Clock):
        _fail(key, "it waits without a deadline")


def _fail(key: Key, what: str) -> None:
    raise InvariantViolated(f"{key}: {what}", key=key)
