"""The table of peers: every way to a peer ends with it."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_protocol.errors import Overloaded, RemoteProtocolError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import InstanceCard, PeerChanged, PeerState, RankCard
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar.peers import DEAD_KEPT_SECONDS, EARLIER_MAX, PeerTable

HTTP = RankAddress("127.64.0.1", 8998)
CONTROL = RankAddress("127.64.0.1", 9000)


def card(**changes: Any) -> InstanceCard:
    fields: dict[str, Any] = {
        "cluster": "c",
        "instance": "p-0",
        "role": "prefill",
        "incarnation": "i-1",
        "session": "s-1",
        "http": HTTP,
        "ranks": (RankCard(RankCoordinate(), CONTROL, 30000),),
    }
    return InstanceCard(**(fields | changes))


def test_a_peer_is_found_by_session_rank_and_bootstrap_address() -> None:
    table = PeerTable(Limits())
    peer, changed = table.meet(card(), 0.0)
    table.remember_bootstrap(HTTP, peer)

    assert changed is None
    assert peer is table.of_session("s-1")
    assert peer is table.of_rank(CONTROL)
    assert peer is table.of_bootstrap(HTTP)


def test_a_card_without_ranks_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="ranks: the card of p-0 names none"):
        PeerTable(Limits()).meet(card(ranks=()), 0.0)


def test_a_restarted_sidecar_is_the_same_peer_under_a_new_session() -> None:
    table = PeerTable(Limits())
    peer, _ = table.meet(card(), 0.0)
    again, changed = table.meet(card(session="s-2"), 1.0)

    assert (peer, None) == (again, changed)
    assert table.of_session("s-1") is None
    assert peer is table.of_session("s-2")


def test_another_incarnation_ends_the_one_before_and_every_way_to_it() -> None:
    table = PeerTable(Limits())
    old, _ = table.meet(card(), 0.0)
    table.remember_bootstrap(HTTP, old)
    moved = RankAddress("127.64.0.9", 9000)
    ranks = (RankCard(RankCoordinate(), moved, 30000),)
    new, changed = table.meet(card(incarnation="i-2", session="s-2", ranks=ranks), 1.0)

    assert PeerState.DEAD is old.state
    assert isinstance(changed, PeerChanged)
    assert "i-1" == changed.incarnation
    assert table.of_session("s-1") is None
    assert table.of_rank(CONTROL) is None
    assert new is table.of_rank(moved)
    assert (new,) == table.all()


def test_an_old_card_that_comes_late_ends_nobody() -> None:
    table = PeerTable(Limits())
    for incarnation in ("i-1", "i-2"):
        table.meet(card(incarnation=incarnation), 0.0)
    peer, _ = table.meet(card(incarnation="i-3"), 0.0)

    for old in ("i-1", "i-2"):
        with pytest.raises(RemoteProtocolError, match=f"incarnation {old} of p-0 has ended; i-3"):
            table.meet(card(incarnation=old), 1.0)
    assert (peer,) == table.all()
    assert PeerState.ALIVE is peer.state


def test_what_is_known_to_be_over_is_bounded_and_outlives_silence() -> None:
    table = PeerTable(Limits())
    for number in range(EARLIER_MAX + 2):
        table.meet(card(incarnation=f"i-{number}"), 0.0)
    silent = table.all()[0]
    silent.node.declared_dead("silent", 1.0)
    again, _ = table.meet(card(incarnation=f"i-{EARLIER_MAX + 1}"), 2.0)

    assert silent is not again
    assert tuple(f"i-{number}" for number in range(1, EARLIER_MAX + 1)) == again.earlier


def test_a_dead_peer_is_not_resolved_and_is_dropped_in_time() -> None:
    table = PeerTable(Limits())
    peer, _ = table.meet(card(), 0.0)
    table.remember_bootstrap(HTTP, peer)
    peer.node.declared_dead("told", 1.0)

    assert table.of_bootstrap(HTTP) is None
    assert [] == table.expire(1.0)
    assert [peer] == table.expire(1.0 + DEAD_KEPT_SECONDS)
    assert () == table.all()
    assert table.of_session("s-1") is None


def test_a_peer_that_only_fell_silent_may_be_met_again() -> None:
    table = PeerTable(Limits())
    silent, _ = table.meet(card(), 0.0)
    silent.node.tick(2.0)
    silent.node.tick(12.0)
    assert PeerState.DEAD is silent.state
    met, changed = table.meet(card(), 13.0)

    assert changed is None
    assert PeerState.ALIVE is met.state


def test_the_table_is_bounded_and_the_dead_go_first() -> None:
    table = PeerTable(Limits(peers_max=2))
    first, _ = table.meet(card(), 0.0)
    table.meet(card(instance="p-1", session="s-2"), 0.0)
    with pytest.raises(Overloaded, match="2 peers"):
        table.meet(card(instance="p-2", session="s-3"), 0.0)
    first.node.declared_dead("told", 1.0)
    table.meet(card(instance="p-2", session="s-3"), 1.0)

    assert ["p-1", "p-2"] == [peer.card.instance for peer in table.all()]
    assert {PeerState.ALIVE: 2} == table.counts()
