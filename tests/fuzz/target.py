"""What a fuzz target is: valid inputs, and the property that every bent one must keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from fuzz.mutation import Parts, drawn_edits, edited

Check = Callable[[Parts], bool]
"""Whether an input was taken in; raises when it does more than being taken or refused."""


class Target(msgspec.Struct, frozen=True):
    """One way in."""

    name: str
    corpus: Sequence[Sequence[bytes]]
    """Valid inputs, each as its parts; every one of them is taken."""
    check: Check
    weight: int = 1
    """How many of the loop's inputs it gets, beside the others."""

    def draw(self, dice: Random) -> Parts:
        """A bent input."""
        return edited(dice.choice(self.corpus), drawn_edits(dice))


def one_part(*bodies: bytes) -> tuple[tuple[bytes, ...], ...]:
    """A corpus whose inputs have a single part."""
    return tuple((body,) for body in bodies)
