"""The other pods of an instance, as its leader sees them: what they are to do, until they have it.

Orders wait in a queue per pod, numbered from 1 for each session of that pod's sidecar, and leave it
when a later call names them as arrived. A pod that takes nothing for so long that its queue runs
over loses what waits there: cancels, whose rooms then end by their clocks, and news of peers, which
it is told anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from pdcluster_protocol.control_api import (
    HELD_SECONDS,
    Dump,
    Order,
    Orders,
    OrdersAsked,
    PeersKnown,
    PodCard,
)
from pdcluster_protocol.errors import RemoteProtocolError
from pdcluster_protocol.messages import DumpRequested, InstanceCard
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar.telemetry import Dropped, Metrics

QUEUED_MAX: Final = 4096
BATCH_MAX: Final = 256
EARLIER_MAX: Final = 8


class Pod:
    """One other pod, in one session of its sidecar."""

    __slots__ = ("_changed", "_first", "_orders", "card", "earlier")

    def __init__(self, card: PodCard, earlier: deque[str]) -> None:
        self.card = card
        self.earlier: Final = earlier
        """Sessions of this pod that are over: a call of theirs may still arrive."""
        self._first = 1
        self._orders: deque[Order] = deque()
        self._changed = asyncio.Event()

    @property
    def settled(self) -> bool:
        """Whether it has everything."""
        return not self._orders

    @property
    def full(self) -> bool:
        """Whether it has taken nothing for too long."""
        return len(self._orders) >= QUEUED_MAX

    def send(self, order: Order) -> bool:
        """Queue an order; False when the pod takes too little."""
        if self.full:
            return False
        self._orders.append(order)
        self._changed.set()
        return True

    def drop_all(self) -> int:
        """Forget what waits; gives how many orders that were."""
        dropped = len(self._orders)
        self._first += dropped
        self._orders.clear()
        return dropped

    def acknowledge(self, after: int) -> None:
        """Orders up to this number have arrived."""
        while self._orders and self._first <= after:
            self._orders.popleft()
            self._first += 1

    async def due(self, seconds: float) -> tuple[int, tuple[Order, ...]]:
        """What waits, and the number of its first; at most so long for the first one."""
        if not self._orders:
            self._changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self._first, tuple(islice(self._orders, BATCH_MAX))


class Pods:
    """All other pods that have called."""

    def __init__(self, session: str, metrics: Metrics) -> None:
        self.peers: Callable[[], Iterable[InstanceCard]] = tuple
        """The living peers, for a pod that knows none of them yet."""
        self._session = session
        self._metrics = metrics
        self._pods: dict[int, Pod] = {}
        self._arrived = asyncio.Event()
        self._dumps: dict[int, tuple[set[int], dict[RankCoordinate, bytes], asyncio.Event]] = {}
        self._dump_count = 0

    def of(self, card: PodCard) -> Pod:
        """The pod of this card; a new session of it begins with all peers.

        Raises:
            RemoteProtocolError: its sidecar has been started anew since this call began.
        """
        pod = self._pods.get(card.node)
        if pod is None or pod.card != card:
            earlier = deque[str](maxlen=EARLIER_MAX) if pod is None else pod.earlier
            if card.session in earlier:
                raise RemoteProtocolError(
                    f"session {card.session} of pod {card.node} has ended; another took its place"
                )
            if pod is not None:
                earlier.append(pod.card.session)
            pod = self._pods[card.node] = Pod(card, earlier)
            pod.send(PeersKnown(tuple(self.peers())))
        return pod

    def order(self, order: Order) -> None:
        """Tell every pod."""
        for pod in self._pods.values():
            if pod.full:
                for _ in range(pod.drop_all()):
                    self._metrics.drop(Dropped.LINK_FULL)
                pod.send(PeersKnown(tuple(self.peers())))
            pod.send(order)

    async def orders(self, asked: OrdersAsked) -> Orders:
        """What a pod is to do; held until there is something, or for a moment."""
        pod = self.of(asked.pod)
        if asked.leader == self._session:
            pod.acknowledge(asked.after)
            if pod.settled:
                self._arrived.set()
        first, orders = await pod.due(HELD_SECONDS)
        return Orders(session=self._session, first=first, orders=orders)

    async def settled(self, seconds: float) -> None:
        """Wait until every pod has everything, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                while not all(pod.settled for pod in self._pods.values()):
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return

    async def dump(self, seconds: float) -> dict[RankCoordinate, bytes]:
        """What the ranks of the other pods say of themselves; what comes too late is absent."""
        if not self._pods:
            return {}
        self._dump_count += 1
        number, described, complete = (
            self._dump_count,
            dict[RankCoordinate, bytes](),
            asyncio.Event(),
        )
        self._dumps[number] = (set(self._pods), described, complete)
        self.order(DumpRequested(number))
        try:
            async with asyncio.timeout(seconds):
                await complete.wait()
        except TimeoutError:
            pass
        finally:
            del self._dumps[number]
        return described

    def described(self, card: PodCard, dump: Dump) -> None:
        """A pod answered a request for a dump."""
        waiting = self._dumps.get(dump.request)
        if waiting is None:
            return
        nodes, described, complete = waiting
        described.update(dump.ranks)
        nodes.discard(card.node)
        if not nodes:
            complete.set()
