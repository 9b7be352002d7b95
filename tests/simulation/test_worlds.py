"""Thousands of seeds: every world comes to rest with one end per leg and no wrong byte."""

from __future__ import annotations

import os
from functools import partial

import pytest

from simulation.cast import Faults
from simulation.checkers import check_rest
from simulation.memory import LAYOUT
from simulation.world import World

SEEDS = int(os.environ.get("PDCLUSTER_SEEDS", "60"))

WELL = {"prefill": [None], "decode": [None]}
HARMLESS = ("quiet", "lossy")
"""Kinds in which every request must be answered, not merely end."""

KINDS = {
    "quiet": Faults(),
    "lossy": Faults(lose=0.2, double=0.2, delay_seconds=0.05),
    "impatient": Faults(cancel=0.6, delay_seconds=0.03),
    "broken wires": Faults(write_fails=0.1, write_lands_late=0.5, cancel=0.2),
    "mortal": Faults(crash=0.5, cancel=0.2, delay_seconds=0.02),
    "flipping": Faults(flip=0.05),
    "fenced": Faults(fence=1.0, delay_seconds=0.02),
    "confused": Faults(other_tokens=0.3),
    "everything": Faults(
        lose=0.1,
        double=0.1,
        delay_seconds=0.03,
        write_fails=0.05,
        write_lands_late=0.5,
        flip=0.01,
        cancel=0.3,
        crash=0.3,
        fence=0.5,
        other_tokens=0.05,
    ),
}


def _request(world: World, room: int, prompt_tokens: int) -> None:
    world.request(room, prompt_tokens)


def _lose_transport(world: World, name: str) -> None:
    world.lose_transport(world.pods[name])


def play(seed: int, faults: Faults, *, requests: int = 12) -> World:
    world = World(seed, faults)
    dice = world.random
    for room in range(1, requests + 1):
        prompt = dice.choice((1, 3, 4, 5, 8, 9, 17, 30))
        world.later(dice.random() * 0.5, partial(_request, world, room, prompt))
    for name in world.pods:
        if dice.random() < faults.crash:
            world.later(dice.random() * 0.6, partial(world.crash, name))
        if dice.random() < faults.fence:
            world.later(dice.random() * 0.6, partial(_lose_transport, world, name))
    world.run()
    return world


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
