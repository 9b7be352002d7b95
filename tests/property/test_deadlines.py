"""Any history of deadlines agrees with a plain dictionary."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdcluster_protocol.deadlines import Deadlines

names = st.integers(0, 5)
# Few moments, so that equal ones are common.
moments = st.integers(0, 12).map(float)


class DeadlineMachine(RuleBasedStateMachine):
    """The heap against a dictionary from name to time."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: Deadlines[int] = Deadlines()
        self.model: dict[int, float] = {}

    @rule(name=names, when=moments)
    def set(self, name: int, when: float) -> None:
        self.deadlines.set(name, when)
        self.model[name] = when

    @rule(name=names, step=st.integers(1, 5))
    def move_often(self, name: int, step: int) -> None:
        for moment in range(0, 80 * step, step):
            self.set(name, float(moment % 13))

    @rule(name=names)
    def clear(self, name: int) -> None:
        self.deadlines.clear(name)
        self.model.pop(name, None)

    @rule(now=moments)
    def collect(self, now: float) -> None:
        due = self.deadlines.due(now)
        expected = {name: when for name, when in self.model.items() if when <= now}
        assert sorted(expected) == sorted(due)
        assert sorted(expected.values()) == [expected[name] for name in due]
        for name in due:
            del self.model[name]

    @invariant()
    def agrees(self) -> None:
        assert min(self.model.values(), default=None) == self.deadlines.next()
        assert len(self.model) == len(self.deadlines)
        assert len(self.deadlines._heap) <= 64 + 4 * 6 + 1


DeadlineMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestDeadlines = DeadlineMachine.TestCase
