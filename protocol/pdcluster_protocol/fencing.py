"""When the owner of the memory destroys the mapping through which late writes could land.

A fence is lazy, since it delays every transfer under way. It happens when nobody is delayed; when
quarantine passes its bound; when the first request in line waits for those pages; or when they have
waited ten abort budgets. It also drops the connections to sessions of peers that are gone
(`contacts`), once they are some and nobody is delayed, or many.
"""

from __future__ import annotations

from typing import Final

from pdcluster_protocol.ledger import Ledger

ABORT_BUDGETS_MAX: Final = 10


class Fencing:
    """The fence of one node; one at a time."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def consider(self, *, bystanders: int) -> None:
        """Fence if there is a reason to; `bystanders` are transfers that it would delay."""
        ledger = self._ledger
        if ledger.fencing or not ledger.ready:
            return
        pages, oldest = ledger.pool.waiting_for_fence()
        cause = self._cause(pages, oldest, bystanders) if oldest is not None else ""
        cause = cause or self._worn(bystanders)
        if cause:
            ledger.fence(cause, pages)

    def _cause(self, pages: int, oldest: float, bystanders: int) -> str:
        ledger = self._ledger
        head = ledger.queue.head()
        if bystanders == 0:
            return "nobody is delayed"
        if pages > ledger.setup.limits.quarantine_fraction_max * ledger.pool.size:
            return "quarantine passed its bound"
        if head is not None and (
            ledger.pool.free_count < head.pages or (head.slot and ledger.slots.free_count == 0)
        ):
            return "a request waits for these pages"
        if ledger.now - oldest > ABORT_BUDGETS_MAX * ledger.setup.timeouts.abort_seconds:
            return "the pages waited too long"
        return ""

    def _worn(self, bystanders: int) -> str:
        limits = self._ledger.setup.limits
        bound = limits.gone_sessions_max if bystanders else limits.gone_sessions_idle_max
        if self._ledger.contacts.gone > bound:
            return f"connections to more than {bound} sessions that are gone"
        return ""
