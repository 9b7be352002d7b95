"""A sink that a test can wait on."""

from __future__ import annotations

import threading

from pdcluster_engine.submission import Output
from pdcluster_protocol.errors import Reason

DEADLINE_SECONDS = 60.0


class Collected:
    """Every output of one sequence, and its end."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ends: list[tuple[Reason | None, str]] = []
        self._changed = threading.Condition()

    def emit(self, output: Output) -> None:
        with self._changed:
            assert not self.ends
            self.outputs.append(output)
            self._changed.notify_all()

    def finished(self) -> None:
        self._end((None, ""))

    def failed(self, reason: Reason, detail: str) -> None:
        self._end((reason, detail))

    def _end(self, end: tuple[Reason | None, str]) -> None:
        with self._changed:
            self.ends.append(end)
            self._changed.notify_all()

    @property
    def token_ids(self) -> list[int]:
        return [output.token_id for output in self.outputs]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    def end(self) -> tuple[Reason | None, str]:
        """The one end, once it is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ends, timeout=DEADLINE_SECONDS)
        assert 1 == len(self.ends)
        return self.ends[0]

    def wait_outputs(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.outputs) >= count, timeout=DEADLINE_SECONDS
            )
