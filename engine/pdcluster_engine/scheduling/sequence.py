"""One computation of one key: pages, history and progress."""

from __future__ import annotations

from pdcluster_engine.model.port import DecodeRow
from pdcluster_engine.scheduling.answer import Answer
from pdcluster_engine.scheduling.orders import Begin, Work
from pdcluster_engine.submission import Submission


class Sequence:
    """What the model thread knows of a key; only that thread touches it.

    `rows` counts the tokens whose KV lies in the pages. The newest token of an answer has no row
    yet, so while decoding `rows == len(history) - 1`.
    """

    __slots__ = ("answer", "begin", "history", "outputs", "rows")

    def __init__(self, begin: Begin, answer: Answer) -> None:
        self.begin = begin
        self.answer = answer
        self.history = list(begin.leg.submission.token_ids)
        """Prompt and outputs, for penalties and positions."""
        self.outputs: list[int] = []
        self.rows = len(self.history) if begin.work is Work.DECODE else 0

    @property
    def submission(self) -> Submission:
        """The request."""
        return self.begin.leg.submission

    def next_chunk(self, chunk_tokens: int) -> tuple[int, int]:
        """Tokens [start, end) of the prompt to compute next; chunks are cut from token 0."""
        return self.rows, min(self.rows + chunk_tokens, len(self.submission.token_ids))

    @property
    def prompt_computed(self) -> bool:
        """Whether every prompt token has its rows."""
        return self.rows >= len(self.submission.token_ids)

    def append(self, token_id: int) -> None:
        """A new token was chosen; its row comes with the next step."""
        self.history.append(token_id)
        self.outputs.append(token_id)

    def decode_row(self) -> DecodeRow:
        """This sequence's part of a decode step."""
        return DecodeRow(self.begin.pages, self.rows, self.history[-1])
