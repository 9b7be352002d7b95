"""Alive, Unknown, Dead: what moves a peer between them, and what does not."""

from __future__ import annotations

from pdcluster_protocol.limits import Limits
from pdcluster_protocol.liveness import PeerNode
from pdcluster_protocol.messages import PeerChanged, PeerState
from pdcluster_protocol.sidecar_messages import Ping

LIMITS = Limits()


def peer() -> PeerNode:
    return PeerNode("i", LIMITS, now=0.0)


def ping(*loops: int) -> Ping:
    return Ping("i", loops)


def test_a_peer_that_is_met_is_alive_and_has_a_deadline() -> None:
    assert PeerState.ALIVE is peer().state
    assert 2.0 == peer().deadline()


def test_moving_pings_keep_it_alive() -> None:
    node = peer()
    for second in range(1, 10):
        assert node.pinged(ping(second * 20), float(second)) is None
        assert node.tick(float(second)) is None

    assert 11.0 == node.deadline()


def test_a_silent_sidecar_makes_it_unknown_then_dead() -> None:
    node = peer()
    node.pinged(ping(1), 1.0)

    assert node.tick(2.9) is None
    assert PeerChanged("i", PeerState.UNKNOWN, "its sidecar is silent for 2 s") == node.tick(3.0)
    assert 13.0 == node.deadline()
    assert node.tick(12.9) is None
    assert PeerChanged("i", PeerState.DEAD, "no word of it for 10 s") == node.tick(13.0)
    assert node.deadline() is None


def test_a_standing_loop_counter_makes_it_unknown_and_never_dead() -> None:
    node = peer()
    node.pinged(ping(7, 1), 1.0)
    node.pinged(ping(7, 2), 2.0)
    changed = node.pinged(ping(7, 3), 3.0)

    assert changed == PeerChanged("i", PeerState.UNKNOWN, "its engine's loop stands still for 2 s")
    for second in range(4, 60):
        assert node.pinged(ping(7, second), float(second)) is None
        assert node.tick(float(second)) is None
    assert PeerState.UNKNOWN is node.state


def test_it_comes_back_when_every_rank_moves_again() -> None:
    node = peer()
    node.pinged(ping(1), 1.0)
    node.tick(3.5)

    assert PeerChanged("i", PeerState.ALIVE, "") == node.pinged(ping(2), 4.0)


def test_a_declared_death_is_final() -> None:
    node = peer()

    assert PeerChanged("i", PeerState.DEAD, "gone") == node.declared_dead("gone", 1.0)
    assert node.declared_dead("gone", 1.0) is None
    assert node.pinged(ping(9), 1.0) is None
    assert node.tick(99.0) is None
    assert PeerState.DEAD is node.state


def test_another_number_of_ranks_starts_the_counters_anew() -> None:
    node = peer()
    node.pinged(ping(1), 1.0)

    assert node.pinged(ping(1, 1), 2.0) is None
    assert 4.0 == node.deadline()


def test_hearing_its_sidecar_delays_death_and_nothing_else() -> None:
    node = peer()
    node.tick(2.0)
    node.heard(8.0)

    assert PeerState.UNKNOWN is node.state
    assert 18.0 == node.deadline()
