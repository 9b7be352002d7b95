"""Prompts that every model can read."""

from __future__ import annotations

import random


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Token ids that every model has."""
    draw = random.Random(f"{seed}/{length}")
    return [draw.randrange(256) for _ in range(length)]
