"""How worlds are bad, and one world of a kind: requests at random moments, deaths and fences."""

from __future__ import annotations

from functools import partial

from simulation.cast import Faults
from simulation.memory import Shape
from simulation.world import World

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


def play(seed: int, faults: Faults, *, shape: Shape | None = None, requests: int = 12) -> World:
    """The world of this seed, at its end."""
    world = World(seed, faults, shape=shape)
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
