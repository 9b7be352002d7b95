"""Transition tables: what a machine may do, as a value that is checked, read and drawn.

A machine holds a state and asks its table for the next one. What the table does not list is a bug
of ours (`IllegalTransition`, carrying the story), never a reaction to a peer: peer input is sorted
out before a trigger is fired. The diagrams in the documentation are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from pdcluster_protocol.errors import IllegalTransition

StateT = TypeVar("StateT", bound=StrEnum)
TriggerT = TypeVar("TriggerT", bound=StrEnum)


class Table(Generic[StateT, TriggerT]):
    """`(state, trigger) → state` for one machine; terminal states lead nowhere."""

    __slots__ = ("initial", "name", "terminals", "transitions")

    def __init__(
        self,
        name: str,
        *,
        initial: StateT,
        transitions: Mapping[tuple[StateT, TriggerT], StateT],
        terminals: Iterable[StateT],
    ) -> None:
        self.name = name
        self.initial = initial
        self.transitions = dict(transitions)
        self.terminals = frozenset(terminals)
        leaving = {state for state, _ in self.transitions} & self.terminals
        if leaving:
            raise ValueError(f"{name}: terminal states must not be left: {sorted(leaving)}")

    def allows(self, state: StateT, trigger: TriggerT) -> bool:
        """Whether the trigger is listed for the state."""
        return (state, trigger) in self.transitions

    def advance(self, state: StateT, trigger: TriggerT) -> StateT:
        """The next state.

        Raises:
            IllegalTransition: the table does not list the pair.
        """
        try:
            return self.transitions[state, trigger]
        except KeyError:
            raise IllegalTransition(f"{self.name}: no {trigger} in {state}") from None

    def mermaid(self) -> str:
        """A Mermaid state diagram of the table."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial}"]
        lines += [
            f"    {before} --> {after}: {trigger}"
            for (before, trigger), after in self.transitions.items()
        ]
        lines += [f"    {state} --> [*]" for state in sorted(self.terminals)]
        return "\n".join(lines) + "\n"
