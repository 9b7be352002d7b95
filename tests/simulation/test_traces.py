"""Golden traces: what happens to a request, told so that a reviewer can read it aloud.

`PDCLUSTER_WRITE_TRACES=1` writes the files anew; a change in them is reviewed like code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from simulation.cast import Faults
from simulation.checkers import check_rest
from simulation.telling import Story
from simulation.world import World

TRACES = Path(__file__).parent / "traces"
STEADY = Faults(steady=True, delay_seconds=0.001)


def _request(world: World, prompt_tokens: int = 9, room: int = 7) -> None:
    world.request(room, prompt_tokens)


def _then(world: World, at: float, action: Callable[[], object]) -> None:
    def act() -> None:
        action()

    world.later(at, act)


def happy(world: World) -> None:
    """A prompt of 9 tokens (three pages of 4) is computed by prefill and answered by decode."""
    _request(world)


def decode_first(world: World) -> None:
    """Decode's leg comes long before prefill's: its page numbers wait, bounded, for the leg."""
    world.hold["prefill"] = 0.02
    _request(world, 4)


def queued_for_pages(world: World) -> None:
    """Two requests and pages for one: the second is back-pressure, not an error."""
    _request(world, 9)
    _request(world, 9, room=8)


def token_mismatch(world: World) -> None:
    """The two legs were given other token ids: refused before the first byte is written."""
    _request(world)


def client_leaves_while_writing(world: World) -> None:
    """The client leaves in the middle: pages go back only after prefill says it has stopped."""
    _request(world, 30)
    _then(world, 0.0095, lambda: world.leave(next(iter(world.requests.values()))))


def client_leaves_while_decoding(world: World) -> None:
    """The client leaves while tokens come: nobody else writes, the model lets go, pages return."""
    _request(world, 4)
    _then(world, 0.0135, lambda: world.leave(next(iter(world.requests.values()))))


def prefill_dies(world: World) -> None:
    """Prefill is killed while it writes: what it sent last may still land, so decode fences."""
    _request(world, 30)
    _then(world, 0.0105, partial(world.crash, "prefill"))


def decode_dies(world: World) -> None:
    """Decode is killed while prefill writes: prefill ends the request and gives its pages back."""
    _request(world, 30)
    _then(world, 0.0105, partial(world.crash, "decode"))


def flipped_byte(world: World) -> None:
    """A byte is flipped on the way: decode refuses to read, prefill hears why."""
    _request(world, 4)


def lost_messages(world: World) -> None:
    """Three of four messages are lost: repetition by key finds the way, doubles change nothing."""
    _request(world, 4)


def decode_transport_restarts(world: World) -> None:
    """Decode's transfer process is replaced under a running write: it is written again."""
    _request(world, 30)
    _then(world, 0.0105, lambda: world.lose_transport(world.pods["decode"]))


def silent_prefill(world: World) -> None:
    """Prefill never answers: decode ends by its stall clock, asks for proof, and fences at last."""
    world.silent.add("prefill")
    _request(world, 4)


FAULTS: dict[Callable[[World], None], Faults] = {
    token_mismatch: Faults(steady=True, delay_seconds=0.001, other_tokens=1.0),
    flipped_byte: Faults(steady=True, delay_seconds=0.001, flip=1.0),
    lost_messages: Faults(steady=True, delay_seconds=0.001, lose=0.75),
}
SIZES: dict[Callable[[World], None], int] = {queued_for_pages: 4}

SCENARIOS = [
    happy,
    decode_first,
    queued_for_pages,
    token_mismatch,
    client_leaves_while_writing,
    client_leaves_while_decoding,
    prefill_dies,
    decode_dies,
    flipped_byte,
    lost_messages,
    decode_transport_restarts,
    silent_prefill,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_the_story_is_the_one_in_the_file(scenario: Callable[[World], None]) -> None:
    assert scenario.__doc__ is not None
    story = Story(scenario.__doc__)
    world = World(3, FAULTS.get(scenario, STEADY), pages=SIZES.get(scenario, 24), log=story.log)
    scenario(world)
    world.run()
    check_rest(world)
    path = TRACES / f"{scenario.__name__}.txt"
    if os.environ.get("PDCLUSTER_WRITE_TRACES"):
        path.write_text(story.text(), encoding="utf-8")

    assert path.read_text(encoding="utf-8") == story.text()
