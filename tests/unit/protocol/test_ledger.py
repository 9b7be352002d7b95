"""What the machines of a node share: the outbox, clocks, the watermark and tombstones."""

from __future__ import annotations

import pytest

from pdcluster_protocol.alone import ALONE, AloneState, AloneTrigger
from pdcluster_protocol.effects import Count, Fence
from pdcluster_protocol.errors import IllegalTransition
from pdcluster_protocol.ids import Key
from pdcluster_protocol.ledger import Clock, Ledger
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.messages import Accepted, KVPoll
from support.ledgers import LANE, PEER, joined_ledger, key, node_setup, sent


class Room:
    """The least that `Ledger.advance` moves."""

    def __init__(self, name: Key) -> None:
        self.key = name
        self.state = ALONE.initial


def test_effects_are_taken_once_and_in_order() -> None:
    ledger = Ledger(node_setup())
    ledger.count("a")
    ledger.send(LANE, Accepted(key(), 0))

    effects = ledger.take_effects()
    assert Count("a") == effects[0]
    assert [(PEER, Accepted(key(), 0))] == sent(effects)
    assert [] == ledger.take_effects()


def test_operations_are_never_numbered_twice() -> None:
    ledger = Ledger(node_setup())

    assert 3 == len({ledger.next_operation() for _ in range(3)})


def test_a_step_goes_into_the_story_with_its_time() -> None:
    ledger = Ledger(node_setup())
    ledger.now = 7.0
    room = Room(key())
    ledger.advance(ALONE, room, AloneTrigger.ADMITTED, "3 pages")

    assert AloneState.RUNNING is room.state
    (step,) = ledger.stories.of(key())
    assert "alone: Admitting --Admitted--> Running (3 pages)" == str(step)
    assert 7.0 == step.at


def test_an_impossible_step_carries_the_key_and_its_story() -> None:
    ledger = Ledger(node_setup())
    room = Room(key())
    ledger.advance(ALONE, room, AloneTrigger.ADMITTED)

    with pytest.raises(IllegalTransition, match="no Admitted in Running; story: alone: Adm") as bug:
        ledger.advance(ALONE, room, AloneTrigger.ADMITTED)
    assert key() == bug.value.key
    assert AloneState.RUNNING is room.state


def test_a_clock_starts_now_and_moves_when_it_is_set_again() -> None:
    ledger = Ledger(node_setup())
    ledger.now = 10.0
    ledger.set_clock(Clock.STALL, key(), 5.0)
    ledger.set_clock(Clock.TOTAL, key(), 6.0)
    assert 15.0 == ledger.deadlines.next()
    ledger.now = 12.0
    ledger.set_clock(Clock.STALL, key(), 5.0)

    assert [(Clock.TOTAL, key()), (Clock.STALL, key())] == ledger.deadlines.due(17.0)


def test_stopping_a_rooms_clocks_leaves_other_keys_and_the_last_word_alone() -> None:
    ledger = Ledger(node_setup())
    for clock in Clock:
        ledger.set_clock(clock, key(1), 1.0)
    ledger.set_clock(Clock.STALL, key(2), 1.0)
    ledger.stop_clocks(key(1))

    # A farewell outlives its room: a lost Failed status would be a hang on the other side.
    expected = {(Clock.FAREWELL, key(1)), (Clock.EARLY, key(1)), (Clock.STALL, key(2))}
    assert expected == set(ledger.deadlines.due(9.0))


def test_an_attempt_is_stale_when_nothing_that_old_can_be_alive() -> None:
    timeouts = Timeouts(bootstrap_seconds=1.0, transfer_seconds=2.0)
    ledger = Ledger(node_setup(timeouts=timeouts, limits=Limits(clock_skew_seconds=3.0)))
    assert not ledger.is_stale(key(milliseconds=0))

    ledger.saw_attempt(key(milliseconds=100_000))
    ledger.saw_attempt(key(milliseconds=50_000))
    assert not ledger.is_stale(key(milliseconds=94_000))
    assert ledger.is_stale(key(milliseconds=93_999))


def test_a_foreign_key_without_an_attempt_is_never_stale() -> None:
    ledger = Ledger(node_setup())
    ledger.saw_attempt(key(milliseconds=1 << 41))

    assert not ledger.is_stale(Key(5, 0))


def test_how_a_key_ended_is_remembered() -> None:
    ledger = Ledger(node_setup())
    ledger.bury(key(), KVPoll.FAILED, reason="Stalled", drained=False)
    tombstone = ledger.tombstone(key())

    assert tombstone is not None
    assert (KVPoll.FAILED, "Stalled", False) == (
        tombstone.status,
        tombstone.reason,
        tombstone.drained,
    )
    assert ledger.tombstone(key(2)) is None


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    ledger = Ledger(node_setup(limits=Limits(tombstones_max=2)))
    for room in (1, 2, 1, 3):
        ledger.bury(key(room), KVPoll.SUCCESS)

    assert 2 == ledger.tombstone_count
    assert ledger.tombstone(key(2)) is None
    assert ledger.tombstone(key(1)) is not None


def test_tombstones_that_nobody_can_ask_for_any_more_are_dropped() -> None:
    ledger = Ledger(node_setup(timeouts=Timeouts(bootstrap_seconds=1.0, transfer_seconds=2.0)))
    ledger.bury(key(1), KVPoll.SUCCESS)
    ledger.now = 2.9
    ledger.bury(key(2), KVPoll.SUCCESS)
    assert ledger.tombstone(key(1)) is not None
    ledger.now = 3.0
    ledger.bury(key(3), KVPoll.SUCCESS)

    assert ledger.tombstone(key(1)) is None
    assert ledger.tombstone(key(2)) is not None


@pytest.fixture
def two_ranks() -> Ledger:
    place = node_setup().ranks[0]
    ledger = joined_ledger(ranks=(place, place))
    ledger.take_effects()
    return ledger


def test_a_node_is_ready_when_each_of_its_ranks_has_a_session(two_ranks: Ledger) -> None:
    assert two_ranks.ready
    two_ranks.transport_lost(1)
    assert not two_ranks.ready
    two_ranks.transport_ready(1, "again", 4096)

    assert two_ranks.ready
    assert [0, 1] == [rank.mapping for rank in two_ranks.ranks]


def test_the_loss_of_one_of_two_mappings_proves_nothing(two_ranks: Ledger) -> None:
    assert not two_ranks.transport_lost(0)
    two_ranks.transport_ready(0, "again", 0)

    assert not two_ranks.transport_lost(1)


def test_the_only_mapping_that_goes_is_a_fence() -> None:
    assert joined_ledger().transport_lost(0)


def test_a_fence_is_complete_when_every_mapping_that_was_there_is_gone(two_ranks: Ledger) -> None:
    two_ranks.fence("test", 3)
    assert [Fence("test", 3)] == two_ranks.take_effects()
    assert not two_ranks.transport_lost(1)
    two_ranks.transport_ready(1, "new", 0)
    # The other one's old mapping is still there: addresses must not get about yet.
    assert two_ranks.ready
    assert two_ranks.fencing
    assert two_ranks.transport_lost(0)
    assert two_ranks.fencing
    two_ranks.transport_ready(0, "new", 0)

    assert not two_ranks.fencing


def test_a_tombstone_that_was_pushed_out_leaves_doubt_for_as_long_as_it_had_to_live() -> None:
    ledger = Ledger(
        node_setup(
            limits=Limits(tombstones_max=1),
            timeouts=Timeouts(bootstrap_seconds=1, transfer_seconds=2),
        )
    )
    assert ledger.drained(key(1))
    ledger.bury(key(1), KVPoll.FAILED, drained=False)
    assert not ledger.drained(key(1))
    assert ledger.drained(key(9))
    ledger.now = 1.0
    ledger.bury(key(2), KVPoll.FAILED)
    assert ledger.drained(key(2))
    assert not ledger.drained(key(1))
    assert not ledger.drained(key(9))
    ledger.now = 3.0

    assert ledger.drained(key(1))


def locked(ledger: Ledger, room: int, now: float) -> Key:
    """A key whose pages and slot wait for a fence since now."""
    ledger.now = now
    for pool in (ledger.pool, ledger.slots):
        pool.reserve(key(room), 1)
        pool.quarantine(key(room), now, needs_fence=True)
    return key(room)


def test_a_fence_frees_nothing_that_a_new_session_may_already_have_touched(
    two_ranks: Ledger,
) -> None:
    early = locked(two_ranks, 1, 1.0)
    two_ranks.fence("test", 1)
    two_ranks.transport_lost(0)
    while_it_ends = locked(two_ranks, 2, 2.0)
    two_ranks.now = 3.0
    two_ranks.transport_ready(0, "new", 0)
    late = locked(two_ranks, 3, 4.0)
    assert two_ranks.transport_lost(1)

    assert [early, while_it_ends] == two_ranks.absolve_fenced()
    assert (late,) == two_ranks.pool.held_keys() == two_ranks.slots.held_keys()
    two_ranks.transport_ready(1, "new", 0)
    two_ranks.fence("again", 1)
    for rank in (0, 1):
        two_ranks.transport_lost(rank)
    assert [late] == two_ranks.absolve_fenced()
