"""A write that failed lands all the same, seconds later, while decode reads the same pages."""

from __future__ import annotations

from functools import partial

import pytest

from pdcluster_protocol.push.prefill_room import PrefillRoom
from simulation.cast import Faults, Pod
from simulation.checkers import check_rest
from simulation.memory import Shape
from simulation.shapes import SHAPES
from simulation.world import World

STRAYS = Faults(write_fails=0.03, write_lands_late=0.9, answer_seconds=1.0)
SEEDS = 2


class BusyWorld(World):
    """Prefill's few pages come to the next request at once; decode's many are held for long."""

    def _make_pod(self, name: str, starts: int = 1) -> Pod:
        self._sizes = (9, 4) if name == "prefill" else (60, 20)
        return super()._make_pod(name, starts)


def play(seed: int, shape: Shape) -> World:
    print(f"seed {seed}")  # noqa: T201 - a failure must name its world
    world = BusyWorld(seed, STRAYS, shape=shape)
    for room in range(1, 31):
        prompt = world.random.choice((5, 9, 17, 30))
        world.later(world.random.random() * 4, partial(_request, world, room, prompt))
    world.run()
    return world


def _request(world: World, room: int, prompt_tokens: int) -> None:
    world.request(room, prompt_tokens)


@pytest.mark.parametrize(
    "shape", [Shape(), SHAPES["heads tp 2 to 1"]], ids=["one rank", "heads tp 2 to 1"]
)
def test_a_late_write_brings_a_running_decode_nothing_of_the_next_request(shape: Shape) -> None:
    for seed in range(SEEDS):
        check_rest(play(seed, shape))


def test_it_would_if_prefill_gave_its_pages_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillRoom, "read_by_strays", property(lambda _room: False))
    violations = [text for seed in range(SEEDS) for text in play(seed, Shape()).violations]

    assert any("decode rank 0 would read" in text for text in violations)
