"""A node that checks itself: tests run whole clusters of engines with it.

Every event that a real process meets is followed by `invariants.check`, and whenever no request is
left, by `invariants.check_idle`. What is violated is raised out of the owner thread, which ends the
process, so no test can pass over it.
"""

from __future__ import annotations

from pdcluster_protocol import invariants
from pdcluster_protocol.effects import Effect
from pdcluster_protocol.events import Event
from pdcluster_protocol.ids import Key
from pdcluster_protocol.messages import Load
from pdcluster_protocol.nodes import Node


class CheckedNode:
    """Stands in for a `Node` towards the owner loop."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What the node answers, after everything that must hold was found to hold.

        Raises:
            InvariantViolated: naming the key and what is wrong.
        """
        effects = self._node.handle(event, now)
        if self._idle():
            invariants.check_idle(self._node)
        else:
            invariants.check(self._node)
        return effects

    def deadline(self) -> float | None:
        return self._node.deadline()

    def load(self) -> Load:
        return self._node.load()

    def dump(self) -> dict[str, object]:
        return {**self._node.dump(), "invariants": "checked"}

    def open_keys(self) -> tuple[Key, ...]:
        return self._node.open_keys()

    def _idle(self) -> bool:
        """No room, nothing waiting for a room or a partner's word, nothing waiting for a fence."""
        ledger = self._node.ledger
        return not (
            self._node.views()
            or self._node.side.waiting_count()
            or len(ledger.queue)
            or ledger.pool.quarantined_count
        )
