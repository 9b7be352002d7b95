"""Every storm passes: one end per leg, no wrong byte, nothing left, and the ends come in time."""

from __future__ import annotations

import os
from functools import partial

import pytest

from pdcluster_protocol import events as ev
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.limits import Limits
from simulation.checkers import check_rest
from simulation.storms import Storm, StormyWorld

SEEDS = int(os.environ.get("PDCLUSTER_SEEDS", "15"))
LATEST_SECONDS = 90.0
"""Bootstrap 20 s, transfer 40 s, and what aborts and fences add; all requests come within 1 s."""

STORMS = {
    "stragglers": Storm(
        straggle=0.2, fence=0.9, times=3, cancel=0.5, write_fails=0.05, write_lands_late=0.5
    ),
    "deaf sidecars": Storm(deaf=1.0, fence=1.0, cancel=0.3, delay_seconds=0.02),
    "old names": Storm(
        old_names=True, crash=0.9, times=2, fence=0.5, untold=0.5, lose=0.2, delay_seconds=0.02
    ),
    "slow fences": Storm(fence=1.0, session_seconds=3.0, delay_seconds=0.02, cancel=0.2),
    "fences in a row": Storm(fence=1.0, times=8, delay_seconds=0.02, cancel=0.3),
    "untold deaths": Storm(
        crash=0.9, times=2, untold=0.8, prefill_late=0.5, lose=0.1, delay_seconds=0.02
    ),
    "nothing ends": Storm(write_hangs=0.05, prefill_hangs=0.2, verify_late=0.1, cancel=0.2),
    "failing parts": Storm(model_fails=0.1, verify_fails=0.05, delay_seconds=0.02),
    "few rooms": Storm(
        rooms=4, cancel=0.5, lose=0.2, double=0.2, straggle=0.1, fence=0.5, delay_seconds=0.02
    ),
    "hasty aborts": Storm(
        abort_seconds=0.02, delay_seconds=0.05, cancel=0.8, lose=0.2, write_fails=0.1, fence=0.5
    ),
    "tiny pools": Storm(
        pages=9, slots=1, delay_seconds=0.02, cancel=0.6, write_fails=0.05, write_lands_late=0.5
    ),
    "tiny tables": Storm(
        limits=Limits(
            run_bytes_max=96, rooms_max=4, waiting_rooms_max=2, tombstones_max=8, peers_max=1
        ),
        cancel=0.3,
        delay_seconds=0.02,
        lose=0.1,
    ),
    "routers": Storm(clock_seconds=50, cancel_first=0.3, drain=0.3, delay_seconds=0.02),
    "no router": Storm(
        router=False, crash=0.5, drain=0.5, lose=0.2, rooms=8, other_tokens=0.1, delay_seconds=0.02
    ),
    "all at once": Storm(
        lose=0.1,
        double=0.1,
        delay_seconds=0.03,
        write_fails=0.05,
        write_lands_late=0.5,
        flip=0.01,
        cancel=0.3,
        crash=0.4,
        times=2,
        fence=0.5,
        other_tokens=0.05,
        straggle=0.1,
        deaf=0.3,
        old_names=True,
        write_hangs=0.02,
        prefill_hangs=0.05,
        untold=0.5,
        model_fails=0.02,
        verify_late=0.05,
        verify_fails=0.02,
        cancel_first=0.05,
        prefill_late=0.1,
        rooms=6,
        pages=12,
        slots=3,
    ),
}

DELAYS = {
    "stragglers": Storm(straggle=0.2, fence=0.9, times=3, delay_seconds=0.02),
    "deaf sidecars": Storm(deaf=1.0, fence=1.0, delay_seconds=0.02),
    "fences in a row": Storm(fence=1.0, times=8, delay_seconds=0.02),
    "slow fences": Storm(fence=1.0, session_seconds=3.0, delay_seconds=0.02),
    "late legs and clocks": Storm(prefill_late=0.5, clock_seconds=50, double=0.5),
    "slow verification": Storm(verify_late=0.2, fence=0.5),
    "tiny pools": Storm(pages=9, slots=1, lose=0.1, delay_seconds=0.01),
}
"""Weather in which every request must be answered."""

WELL = {"prefill": [None], "decode": [None]}
SLANDERS = {
    Reason.WIRE_ERROR,
    Reason.LAYOUT_MISMATCH,
    Reason.METADATA_CORRUPT,
    Reason.RANK_CONFLICT,
    Reason.STALE_ATTEMPT,
    Reason.TOO_LARGE,
}
"""Reasons that blame a request or a peer; no storm makes one true."""


def _request(world: StormyWorld, room: int, prompt_tokens: int) -> None:
    world.request(room, prompt_tokens)


def _lose_transport(world: StormyWorld, name: str) -> None:
    world.lose_transport(world.pods[name])


def _drain(world: StormyWorld, name: str) -> None:
    world.give(world.pods[name], ev.Drained())


def play(seed: int, storm: Storm, *, requests: int = 12) -> StormyWorld:
    world = StormyWorld(seed, storm)
    dice = world.random
    for number in range(1, requests + 1):
        room = 1 + dice.randrange(storm.rooms) if storm.rooms else number
        prompt = dice.choice((1, 3, 4, 5, 8, 9, 17, 30))
        world.later(dice.random() * 0.5, partial(_request, world, room, prompt))
    for name in world.pods:
        for _ in range(storm.times):
            if world.happens(storm.crash):
                world.later(dice.random() * 0.8, partial(world.crash, name))
            if world.happens(storm.fence):
                world.later(dice.random(), partial(_lose_transport, world, name))
        if world.happens(storm.deaf):
            world.later(dice.random() * 0.8, partial(world.deafen, name))
        if world.happens(storm.drain):
            world.later(dice.random() * 0.5, partial(_drain, world, name))
    world.run(until=LATEST_SECONDS)
    return world


@pytest.mark.parametrize("storm", STORMS)
def test_every_storm_passes_and_no_good_request_is_called_bad(storm: str) -> None:
    for seed in range(SEEDS):
        print(f"seed {seed} of {storm!r}")  # noqa: T201 - a failure must name its world
        world = play(seed, STORMS[storm])
        check_rest(world)
        ends = {end for r in world.requests.values() for leg in r.ends.values() for end in leg}
        assert set() == ends & SLANDERS


@pytest.mark.parametrize("storm", DELAYS)
def test_what_only_delays_fails_nobody(storm: str) -> None:
    for seed in range(SEEDS):
        print(f"seed {seed} of {storm!r}")  # noqa: T201 - a failure must name its world
        world = play(seed, DELAYS[storm])
        check_rest(world)
        assert all(request.ends == WELL for request in world.requests.values())
