"""Orders for the other pods of an instance: numbered, kept until they have arrived, bounded."""

from __future__ import annotations

import asyncio

import pytest

from pdcluster_protocol.control_api import Dump, Orders, OrdersAsked, PeersKnown, PodCard
from pdcluster_protocol.errors import Reason, RemoteProtocolError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import CancelLeg, DumpRequested
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar import pods as pods_module
from pdcluster_sidecar.pods import QUEUED_MAX, Pods
from pdcluster_sidecar.telemetry import Metrics

HTTP = RankAddress("127.64.0.2", 8998)
ONE = PodCard(1, HTTP, "s-1")
NO_PEERS = PeersKnown(())


def cancel(number: int) -> CancelLeg:
    return CancelLeg(f"pd-{number}", None, Reason.ABORTED)


async def ask(pods: Pods, after: int, *, leader: str = "leader", card: PodCard = ONE) -> Orders:
    return await pods.orders(OrdersAsked(instance="i", pod=card, leader=leader, after=after))


async def test_a_pod_begins_with_the_peers_and_gets_each_order_until_it_has_arrived() -> None:
    pods = Pods("leader", Metrics())
    assert Orders(session="leader", first=1, orders=(NO_PEERS,)) == await ask(pods, 0, leader="")
    pods.order(cancel(1))

    twice = [await ask(pods, 1), await ask(pods, 1)]
    assert [Orders(session="leader", first=2, orders=(cancel(1),))] * 2 == twice
    pods.order(cancel(2))
    assert (3, (cancel(2),)) == ((seen := await ask(pods, 2)).first, seen.orders)


async def test_a_number_of_another_leaders_session_acknowledges_nothing() -> None:
    pods = Pods("leader", Metrics())
    assert (NO_PEERS,) == (await ask(pods, 7, leader="the one before")).orders


async def test_a_new_session_of_a_pod_begins_anew() -> None:
    pods = Pods("leader", Metrics())
    await ask(pods, 0)
    pods.order(cancel(1))
    again = await ask(pods, 0, card=PodCard(1, HTTP, "s-2"))
    assert (1, (NO_PEERS,)) == (again.first, again.orders)


async def test_a_late_call_of_an_earlier_session_takes_nothing_from_the_present_one() -> None:
    pods = Pods("leader", Metrics())
    await ask(pods, 0)
    present = PodCard(1, HTTP, "s-2")
    await ask(pods, 0, card=present)
    pods.order(cancel(1))
    with pytest.raises(RemoteProtocolError, match="session s-1 of pod 1 has ended"):
        await ask(pods, 0)

    assert (NO_PEERS, cancel(1)) == (await ask(pods, 0, card=present)).orders


async def test_a_call_is_held_until_there_is_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = Pods("leader", Metrics())
    await ask(pods, 0)
    asking = asyncio.create_task(ask(pods, 1))
    await asyncio.wait([asking], timeout=0.05)
    assert not asking.done()
    pods.order(cancel(1))
    assert (cancel(1),) == (await asking).orders

    monkeypatch.setattr(pods_module, "HELD_SECONDS", 0.01)
    assert (3, ()) == ((seen := await ask(pods, 2)).first, seen.orders)


async def test_a_pod_that_takes_nothing_loses_what_waits_and_is_told_its_peers_anew() -> None:
    pods = Pods("leader", Metrics())
    await ask(pods, 0)
    for number in range(QUEUED_MAX):
        pods.order(cancel(number))

    seen = await ask(pods, 0)
    assert (QUEUED_MAX + 1, (NO_PEERS, cancel(QUEUED_MAX - 1))) == (seen.first, seen.orders)


async def test_settled_waits_until_every_pod_has_everything_or_the_time_is_over() -> None:
    pods = Pods("leader", Metrics())
    await pods.settled(0.0)
    await ask(pods, 0)
    pods.order(cancel(1))
    settling = asyncio.create_task(pods.settled(20))
    await asyncio.wait([settling], timeout=0.02)
    assert not settling.done()
    asking = asyncio.create_task(ask(pods, 2))
    async with asyncio.timeout(5):
        await settling
    asking.cancel()
    pods.order(cancel(2))
    await pods.settled(0.01)


async def test_a_dump_ends_with_the_last_pod_or_with_its_time() -> None:
    pods = Pods("leader", Metrics())
    assert {} == await pods.dump(5.0)
    await ask(pods, 0)
    describing = asyncio.create_task(pods.dump(5.0))
    [asked] = (await ask(pods, 1)).orders
    assert isinstance(asked, DumpRequested)
    place = RankCoordinate(dp=1)
    pods.described(ONE, Dump(asked.request, ((place, b"{}"),)))
    assert {place: b"{}"} == await describing

    assert {} == await pods.dump(0.01)
    pods.described(ONE, Dump(asked.request, ((place, b"{}"),)))
