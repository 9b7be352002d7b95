"""From the engine's threads into the event loop: all outputs since the last wake-up at once.

Bounded by what was asked for: a sequence emits at most its `output_tokens_max` outputs and one end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

import msgspec

from pdcluster_engine.submission import Output
from pdcluster_protocol.errors import Reason


class Ended(msgspec.Struct, frozen=True):
    """The one end of a sequence; `reason` is None for a good one."""

    reason: Reason | None = None
    detail: str = ""


Item = tuple[int, Output | Ended]
"""The index of a sequence in its request, and what came of it."""


class Mailbox:
    """Outputs of all sequences of one request, in order; made inside the running loop."""

    __slots__ = ("_items", "_lock", "_loop", "_woken")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[Item] = []

    def sink(self, index: int) -> SequenceSink:
        """The sink of one sequence."""
        return SequenceSink(self, index)

    def post(self, item: Item) -> None:
        """Add an item, from any thread; only the first one since `take` wakes the loop."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            # A loop that has closed waits for nothing any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._woken.set)

    async def take(self) -> list[Item]:
        """Everything that has gathered, at least one item.

        Waits as long as the engine owes an end: its clocks, not ours, decide when that comes.
        """
        await self._woken.wait()
        with self._lock:
            items, self._items = self._items, []
            self._woken.clear()
        return items


class SequenceSink:
    """The `OutputSink` of one sequence; never blocks."""

    __slots__ = ("_index", "_mailbox")

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self._mailbox = mailbox
        self._index = index

    def emit(self, output: Output) -> None:
        self._mailbox.post((self._index, output))

    def finished(self) -> None:
        self._mailbox.post((self._index, Ended()))

    def failed(self, reason: Reason, detail: str) -> None:
        self._mailbox.post((self._index, Ended(reason, detail)))
