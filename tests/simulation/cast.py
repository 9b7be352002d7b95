"""Who plays in a world: faults, pods, requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.nodes import Node
from simulation.memory import Memory


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, write or request, and seconds."""

    lose: float = 0.0
    double: float = 0.0
    delay_seconds: float = 0.002
    write_fails: float = 0.0
    write_lands_late: float = 0.0
    flip: float = 0.0
    answer_seconds: float = 0.0
    """How much longer the model takes for each answer, reading the prompt again for each token."""
    cancel: float = 0.0
    crash: float = 0.0
    fence: float = 0.0
    other_tokens: float = 0.0
    steady: bool = False
    """Every delay is exactly `delay_seconds`: for stories that are to be read."""


@dataclass
class Rank:
    """One rank of a side: its memory, address and transport session."""

    memory: Memory
    address: RankAddress
    sessions: int = 0
    losses: int = 0
    session: str = ""


@dataclass
class Pod:
    """One side: its node and its ranks."""

    name: str
    node: Node
    ranks: list[Rank]
    incarnation: str
    starts: int = 1
    computing: dict[Key, int] = field(default_factory=dict)
    wake: int = 0


@dataclass
class Request:
    """One client request as the world knows it."""

    key: Key
    prompt_tokens: int
    output_tokens: int
    ends: dict[str, list[Reason | None]] = field(
        default_factory=lambda: {"prefill": [], "decode": []}
    )
    legs: set[str] = field(default_factory=set)
    decoded: bool = False
    mismatched: bool = False
    """Prefill was given other token ids than decode."""
