"""Worlds of several ranks on each side: the same promises, whatever mapping lies between them."""

from __future__ import annotations

import os
from functools import partial

import pytest

from pdcluster_protocol import effects as fx
from pdcluster_protocol.messages import TransferMetadata
from simulation.checkers import check_rest
from simulation.shapes import SHAPES
from simulation.test_worlds import HARMLESS, KINDS, WELL
from simulation.world import World

SEEDS = int(os.environ.get("PDCLUSTER_SEEDS", "60")) // 12 or 1
MIXED = ("quiet", "lossy", "impatient", "broken wires", "mortal", "fenced", "everything")


def play(seed: int, kind: str, shape: str, *, requests: int = 8) -> World:
    faults = KINDS[kind]
    world = World(seed, faults, shape=SHAPES[shape])
    dice = world.random
    for room in range(1, requests + 1):
        prompt = dice.choice((1, 3, 4, 5, 8, 9, 17, 30))
        world.later(dice.random() * 0.5, partial(_request, world, room, prompt))
    for name in world.pods:
        if dice.random() < faults.crash:
            world.later(dice.random() * 0.6, partial(world.crash, name))
        if dice.random() < faults.fence:
            world.later(dice.random() * 0.6, partial(_lose_one, world, name))
    world.run()
    return world


def _request(world: World, room: int, prompt_tokens: int) -> None:
    world.request(room, prompt_tokens)


def _lose_one(world: World, name: str) -> None:
    """The transfer process of one rank dies; those of the others live on."""
    pod = world.pods[name]
    world.lose_transport(pod, world.random.randrange(len(pod.ranks)))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_world_of_several_ranks_comes_to_rest(shape: str) -> None:
    for kind in MIXED:
        for seed in range(SEEDS):
            print(f"seed {seed} of {kind!r}, {shape}")  # noqa: T201 - a failure must name its world
            world = play(seed, kind, shape)
            check_rest(world)
            if kind in HARMLESS:
                assert all(request.ends == WELL for request in world.requests.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_each_decode_rank_gets_every_byte_of_its_rows_once(shape: str) -> None:
    world = play(1, "quiet", shape)
    check_rest(world)
    prompts = sum(request.prompt_tokens for request in world.requests.values())
    row_bytes = sum(rank.memory.place.layout.bytes_per_token for rank in world.pods["decode"].ranks)

    assert prompts * row_bytes == world.counts["kv"]


def test_dummies_are_told_of_no_pages_and_write_nothing() -> None:
    writers, told = set(), set()

    def log(_now: float, _who: str, what: object) -> None:
        match what:
            case fx.Write():
                writers.add(what.rank)
            case fx.Send(to, TransferMetadata(dummy=dummy)):
                told.add((to.port - 9000, dummy))

    world = World(1, shape=SHAPES["latent tp 4 to 2, with dummies"], log=log)
    world.request(1, 9)
    world.run()
    check_rest(world)

    assert {0, 2} == writers
    assert {(0, False), (1, True), (2, False), (3, True)} == told
