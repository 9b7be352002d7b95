"""Whether our instance takes new requests, and what follows where that changes.

Routers hold a call open until it does. Ranks are told how far a drain is: all of them drain with
the first one, and none may leave before the last room has ended. The leading pod knows that for all
pods; another passes its word on, and until then says only what it sees itself.
"""

from __future__ import annotations

import asyncio

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.instance import InstanceNode
from pdcluster_protocol.messages import Drain


class Standing:
    """What ranks and routers are told of our instance's readiness."""

    def __init__(self, instance: InstanceNode, *, leads: bool) -> None:
        self._instance = instance
        self._leads = leads
        self._leaders_word: Drain | None = None
        self._told: Drain | None = None
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._closing = False

    @property
    def order(self) -> Drain | None:
        """How far the drain is; None: nobody drains."""
        if self._leaders_word is not None:
            return self._leaders_word
        if not self._instance.draining:
            return None
        return Drain(Reason.SHUTTING_DOWN, done=self._leads and self._instance.drained)

    def hear(self, leaders_word: Drain | None) -> None:
        """What the leader says of all pods."""
        self._leaders_word = leaders_word

    def news(self) -> Drain | None:
        """The order, if it was not given yet; to be asked when a rank has spoken."""
        order = self.order
        if order == self._told:
            return None
        self._told = order
        self.wake()
        return order

    def reset(self) -> None:
        """The instance ended, and its drain with it."""
        self._leaders_word = self._told = None
        self.wake()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closing = True
        self.wake()

    async def while_ready(self, incarnation: str, seconds: float) -> None:
        """Wait while this incarnation takes new requests, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                while self._is_ready(incarnation):
                    await self._changed.wait()
        except TimeoutError:
            return

    def _is_ready(self, incarnation: str) -> bool:
        ours = self._instance
        ready = ours.incarnation == incarnation and not ours.unready(self._loop.time())
        return ready and not self._closing
