"""The order of things on the model thread.

Prompts take turns, one chunk each; after every chunk all running answers get one token, so a long
prompt delays them by a chunk and never by itself. At most `sequences_max` answers run, in order of
arrival; the others wait with their pages.
"""

from __future__ import annotations

from collections import deque

from pdcluster_engine.scheduling.sequence import Sequence
from pdcluster_protocol.ids import Key


class Scheduler:
    """Who is computed next; holds no threads and computes nothing."""

    __slots__ = ("_prompts", "_running", "_sequences_max", "_waiting")

    def __init__(self, *, sequences_max: int) -> None:
        self._sequences_max = sequences_max
        self._prompts: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Nothing to compute."""
        return not (self._prompts or self._waiting or self._running)

    @property
    def queued(self) -> int:
        """Sequences that have their pages and wait for their turn to produce tokens."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Prompts and answers under way."""
        return len(self._prompts) + len(self._running)

    def add_prompt(self, sequence: Sequence) -> None:
        """A prompt to compute."""
        self._prompts.append(sequence)

    def add_answer(self, sequence: Sequence) -> None:
        """An answer to continue, whose prompt has its rows."""
        self._waiting.append(sequence)

    def next_prompt(self) -> Sequence | None:
        """The prompt whose chunk is due; it goes to the end of the line until removed."""
        if not self._prompts:
            return None
        self._prompts.rotate(-1)
        return self._prompts[-1]

    def next_batch(self) -> tuple[Sequence, ...]:
        """All answers of the next step, filled up from those that wait."""
        while self._waiting and len(self._running) < self._sequences_max:
            self._running.append(self._waiting.popleft())
        return tuple(self._running)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is."""
        for line in (self._prompts, self._waiting, self._running):
            if sequence in line:
                line.remove(sequence)

    def find(self, key: Key) -> Sequence | None:
        """The sequence of a key."""
        for line in (self._prompts, self._waiting, self._running):
            for sequence in line:
                if sequence.begin.key == key:
                    return sequence
        return None
