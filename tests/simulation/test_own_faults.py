"""A fault of our own in one room fails that room, loudly, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pdcluster_protocol import invariants
from pdcluster_protocol.admission import Grant
from pdcluster_protocol.errors import IllegalTransition, InvariantViolated, Reason
from pdcluster_protocol.push.decode_rooms import DecodeRooms
from pdcluster_protocol.push.prefill_rooms import PrefillRooms
from pdcluster_protocol.push.sender import SENDER, SenderTrigger
from simulation.cast import Request
from simulation.weather import WELL
from simulation.world import World

BROKEN = 3
ROOMS = (1, 2, BROKEN, 4, 5)


def breaks(
    monkeypatch: pytest.MonkeyPatch, side: type[Any], method: str, room_of: Callable[[Any], int]
) -> None:
    """Let a method of one side break our own rules for one room, after it has done its work."""
    works = getattr(side, method)

    def broken(self: Any, *arguments: Any) -> Any:
        answer = works(self, *arguments)
        if room_of(arguments[0]) == BROKEN:
            found = self.rooms.get(BROKEN)
            if found is not None:
                raise InvariantViolated("planted", key=found.key)
        return answer

    monkeypatch.setattr(side, method, broken)


def play() -> World:
    world = World(5, pages=32)
    for room in ROOMS:
        world.later(room * 0.0007, partial(_request, world, room))
    world.run()
    return world


def _request(world: World, room: int) -> None:
    world.request(room, 17)


def _room(room: Any) -> int:
    number: int = room.key.room
    return number


@pytest.mark.parametrize(
    ("side", "method"),
    [
        (PrefillRooms, "rows_written"),
        (PrefillRooms, "granted"),
        (PrefillRooms, "_push_on"),
        (PrefillRooms, "leg_arrived"),
        (DecodeRooms, "leg_arrived"),
        (DecodeRooms, "granted"),
        (DecodeRooms, "_alive"),
        (DecodeRooms, "metadata_read"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_only_the_room_with_the_fault_ends(
    monkeypatch: pytest.MonkeyPatch, side: type[Any], method: str
) -> None:
    breaks(monkeypatch, side, method, _room)
    world = play()
    name = "prefill" if side is PrefillRooms else "decode"
    requests = {request.key.room: request for request in world.requests.values()}

    assert [] == world.violations
    assert [WELL] * 4 == [requests[room].ends for room in ROOMS if room != BROKEN]
    assert [Reason.INVARIANT_VIOLATED] == requests[BROKEN].ends[name]
    assert 1 == world.counts["fault of ours: InvariantViolated"]
    assert 1 == world.counts["core_fault"]
    _nothing_but_condemned_pages(world, requests[BROKEN])


def _nothing_but_condemned_pages(world: World, broken: Request) -> None:
    for pod in world.pods.values():
        invariants.check(pod.node)
        assert [] == pod.node.views()
        pool = pod.node.ledger.pool
        assert set(pool.held_keys()) <= {broken.key}
        assert not pool.holds(broken.key) or pool.is_condemned(broken.key)


def test_pages_of_a_fault_stay_locked_through_every_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, DecodeRooms, "_alive", _room)
    world = play()
    decode = world.pods["decode"]
    held = decode.node.ledger.pool.held_keys()
    world.lose_transport(decode)
    world.run(until=world.now + 60)

    assert [BROKEN] == [key.room for key in held]
    assert held == decode.node.ledger.pool.held_keys()
    assert BROKEN == next(iter(held)).room


def test_an_illegal_transition_is_told_with_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def log(_now: float, _who: str, what: object) -> None:
        if type(what).__name__ == "Report":
            told.append(str(what))

    def granted(self: PrefillRooms, grant: Grant) -> None:
        room = self.rooms[grant.key.room]
        self._ledger.advance(SENDER, room, SenderTrigger.CONCLUDED)

    monkeypatch.setattr(PrefillRooms, "granted", granted)
    world = World(5, log=log)
    world.request(1, 9)
    world.run()

    assert 1 == len(told)
    assert "IllegalTransition" in told[0]
    assert "story: " in told[0]
    assert "PagesKnown" in told[0]


def test_a_fault_in_an_event_of_all_rooms_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: DecodeRooms, _rank: int) -> None:
        raise IllegalTransition("planted")

    monkeypatch.setattr(DecodeRooms, "transport_lost", broken)
    world = World(5)

    with pytest.raises(IllegalTransition):
        world.lose_transport(world.pods["decode"])
