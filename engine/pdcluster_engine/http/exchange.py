"""The sequences of one HTTP request in flight: one end for all of them.

The request succeeds when every sequence has. The first failure ends the others, and so does a
client that goes.
"""

from __future__ import annotations

from pdcluster_engine.http.mailbox import Ended, Mailbox
from pdcluster_engine.http.sequences import Sequence
from pdcluster_engine.http.shapes import Fresh
from pdcluster_engine.submission import Engine
from pdcluster_protocol.errors import Reason, RequestFailed


class Exchange:
    """Submits sequences and hands out what comes of them."""

    __slots__ = ("_engine", "_mailbox", "_open", "_submitted", "sequences")

    def __init__(self, engine: Engine, sequences: list[Sequence]) -> None:
        self._engine = engine
        self._mailbox = Mailbox()
        self._submitted = 0
        self._open = len(sequences)
        self.sequences = sequences

    @property
    def open(self) -> bool:
        """Whether a sequence has yet to end."""
        return self._open > 0

    def submit(self) -> None:
        """Hand every sequence to the engine.

        Raises:
            Overloaded, RequestFailed: one was refused; `cancel` ends those before it.
        """
        for sequence in self.sequences:
            self._engine.submit(sequence.submission, self._mailbox.sink(sequence.index))
            self._submitted += 1

    async def fresh(self) -> list[Fresh]:
        """The outputs since the last call; they stand in their sequences too.

        Raises:
            RequestFailed: a sequence ended badly.
        """
        fresh: list[Fresh] = []
        failure: RequestFailed | None = None
        for index, item in await self._mailbox.take():
            sequence = self.sequences[index]
            if not isinstance(item, Ended):
                sequence.outputs.append(item)
                fresh.append((sequence, item))
                continue
            sequence.ended = True
            self._open -= 1
            if item.reason is not None and failure is None:
                failure = RequestFailed(
                    item.detail, reason=item.reason, key=sequence.submission.key
                )
        if failure is not None:
            raise failure
        return fresh

    def cancel(self, reason: Reason, detail: str) -> None:
        """End every sequence that was submitted and has not ended; only the first call does."""
        submitted, self._submitted = self.sequences[: self._submitted], 0
        for sequence in submitted:
            if not sequence.ended:
                self._engine.cancel(sequence.submission.key, reason, detail)
