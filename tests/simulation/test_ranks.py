"""Worlds of several ranks on each side: the same promises, whatever mapping lies between them."""

from __future__ import annotations

import os

import pytest

from pdcluster_protocol import effects as fx
from pdcluster_protocol.messages import TransferMetadata
from simulation.checkers import check_rest
from simulation.shapes import SHAPES
from simulation.weather import HARMLESS, KINDS, WELL, play
from simulation.world import World

SEEDS = int(os.environ.get("PDCLUSTER_SEEDS", "60")) // 12 or 1
MIXED = ("quiet", "lossy", "impatient", "broken wires", "mortal", "fenced", "everything")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_world_of_several_ranks_comes_to_rest(shape: str) -> None:
    for kind in MIXED:
        for seed in range(SEEDS):
            print(f"seed {seed} of {kind!r}, {shape}")  # noqa: T201 - a failure must name its world
            world = play(seed, KINDS[kind], shape=SHAPES[shape], requests=8)
            check_rest(world)
            if kind in HARMLESS:
                assert all(request.ends == WELL for request in world.requests.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_each_decode_rank_gets_every_byte_of_its_rows_once(shape: str) -> None:
    world = play(1, KINDS["quiet"], shape=SHAPES[shape], requests=8)
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
