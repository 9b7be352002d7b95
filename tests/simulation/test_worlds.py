"""Thousands of seeds: every world comes to rest with one end per leg and no wrong byte."""

from __future__ import annotations

import os

import pytest

from simulation.cast import Faults
from simulation.checkers import check_rest
from simulation.memory import LAYOUT
from simulation.weather import HARMLESS, KINDS, WELL, play

SEEDS = int(os.environ.get("PDCLUSTER_SEEDS", "60"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_world_comes_to_rest(kind: str) -> None:
    for seed in range(SEEDS):
        print(f"seed {seed} of {kind!r}")  # noqa: T201 - a failure must name its world
        world = play(seed, KINDS[kind])
        check_rest(world)
        if kind in HARMLESS:
            assert all(request.ends == WELL for request in world.requests.values())


def test_a_quiet_world_answers_everything_and_moves_exactly_the_prompts_bytes() -> None:
    world = play(1, Faults())
    check_rest(world)
    prompts = sum(request.prompt_tokens for request in world.requests.values())

    assert all(request.ends == WELL for request in world.requests.values())
    assert prompts * LAYOUT.bytes_per_token == world.counts["kv"]


def test_faults_are_really_injected() -> None:
    counts: dict[str, int] = {}
    for seed in range(20):
        for what, amount in play(seed, KINDS["everything"]).counts.items():
            counts[what] = counts.get(what, 0) + amount

    assert {"lost", "flipped", "fence"} <= counts.keys()


def test_the_same_seed_is_the_same_world() -> None:
    first, second = play(7, KINDS["everything"]), play(7, KINDS["everything"])

    assert first.counts == second.counts
    assert first.now == second.now
