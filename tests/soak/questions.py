"""What clients ask, and the right answers: those of one engine alone, before anything dies.

A set of questions keeps all parts of a pair busy at once: half of them compute long prompts, half
decode long answers; half of each are streams. Every prompt of a set differs, and sets take turns,
so pages that still hold an earlier request's rows would be seen.
"""

from __future__ import annotations

import asyncio
import random
import time
from enum import StrEnum

import msgspec

from support.cluster import Ended, PairCluster
from support.prompts import prompt

SETS = 3
ORACLES_IN_PARALLEL = 8
LONG_PROMPT, SHORT_ANSWER = 640, 40
SHORT_PROMPT, LONG_ANSWER = 96, 100


class End(StrEnum):
    """How one request ended for its client."""

    RIGHT = "right"
    FAILED = "failed"
    """With one error that names its leg and its reason, after right tokens only."""
    CUT = "cut"
    """The connection closed before an end: clear only where the router itself died."""
    WRONG = "wrong"
    UNCLEAR = "unclear"
    """Two ends, an error without a name, or none within the deadline."""


class Question(msgspec.Struct, frozen=True):
    """One request."""

    ids: tuple[int, ...]
    tokens: int
    streamed: bool


class Seen(msgspec.Struct, frozen=True):
    """What became of one request."""

    end: End
    at: float
    """When, on the monotonic clock."""
    leg: str = ""
    reason: str = ""
    detail: str = ""


class Bank:
    """Sets of questions with their answers."""

    def __init__(
        self, cluster: PairCluster, *, clients: int, deadline_seconds: float, sets: int = SETS
    ) -> None:
        self._cluster = cluster
        self._deadline_seconds = deadline_seconds
        self._answers: dict[Question, Ended] = {}
        self._sets = [_questions(clients, seed=number) for number in range(sets)]

    async def prepare(self) -> None:
        """Let one engine answer everything alone."""
        places = asyncio.Semaphore(ORACLES_IN_PARALLEL)
        await asyncio.gather(*(self._answer(q, places) for one in self._sets for q in one))

    def draw(self, dice: random.Random) -> list[Question]:
        """One set, in another order each time."""
        drawn = list(dice.choice(self._sets))
        dice.shuffle(drawn)
        return drawn

    async def ask(self, question: Question) -> Seen:
        """One client; its end is judged at once."""
        cluster, ids = self._cluster, list(question.ids)
        asked = cluster.stream if question.streamed else cluster.generate
        try:
            async with asyncio.timeout(self._deadline_seconds):
                ended = await asked(ids, question.tokens)
        except TimeoutError:
            detail = f"no end within {self._deadline_seconds:g} s"
            return Seen(End.UNCLEAR, time.monotonic(), detail=detail)
        at = time.monotonic()
        return judge(self._answers[question], ended, at, exact=cluster.mode == "exact")

    async def _answer(self, question: Question, places: asyncio.Semaphore) -> None:
        async with places:
            self._answers[question] = await self._cluster.alone(list(question.ids), question.tokens)


def _questions(count: int, *, seed: int) -> list[Question]:
    shapes = ((LONG_PROMPT, SHORT_ANSWER), (SHORT_PROMPT, LONG_ANSWER))
    return [
        Question(
            # A page is 64 tokens: lengths differ by less and by more than one.
            tuple(prompt(shapes[index % 2][0] + 7 * index, seed=1000 * seed + index)),
            shapes[index % 2][1],
            streamed=index % 4 < 2,
        )
        for index in range(count)
    ]


def judge(right: Ended, seen: Ended, at: float, *, exact: bool) -> Seen:
    """Compare an end with the right answer; in mode exact the top logprobs too, bit by bit."""
    tokens = len(seen.ids)
    if right.ids[:tokens] != seen.ids or (seen.done and len(right.ids) != tokens):
        return Seen(End.WRONG, at, detail=f"{seen.ids} is not the beginning of {right.ids}")
    if exact and right.tops[: len(seen.tops)] != seen.tops:
        return Seen(End.WRONG, at, detail="top logprobs differ")
    if seen.clear and seen.done:
        return Seen(End.RIGHT, at)
    error = seen.error or {}
    named = {"leg": str(error.get("leg", "")), "reason": str(error.get("code", ""))}
    if seen.clear:
        return Seen(End.FAILED, at, **named, detail=str(error.get("message", "")))
    if seen.error is None and seen.ends == 0:
        return Seen(End.CUT, at)
    return Seen(End.UNCLEAR, at, **named, detail=f"{seen.status=} {seen.ends=} {error}")
