"""Who waits for a change of our readiness, and what ranks are told of a drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.instance import InstanceNode
from pdcluster_protocol.messages import Drain, Load, Pulse
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar.standing import Standing
from support.instances import hello, instance

LONG_SECONDS = 60.0
BEGUN = Drain(Reason.SHUTTING_DOWN)
DONE = Drain(Reason.SHUTTING_DOWN, done=True)

Change = Callable[[InstanceNode, Standing], object]


def joined() -> InstanceNode:
    """Both ranks of an instance, which lives from now on."""
    made, now = instance(), asyncio.get_running_loop().time()
    for dp in (0, 1):
        made.join(hello(dp), minted="i", now=now)
    return made


def pulse(made: InstanceNode, dp: int, *, draining: bool = True, rooms: int = 0) -> None:
    said = Pulse(1, Load(rooms_open=rooms), rooms, draining)
    made.pulse(RankCoordinate(dp=dp), said, asyncio.get_running_loop().time())


def drain(made: InstanceNode, standing: Standing) -> None:
    pulse(made, 1)
    standing.news()


def end(made: InstanceNode, standing: Standing) -> None:
    made.end()
    standing.reset()


def close(_made: InstanceNode, standing: Standing) -> None:
    standing.close()


@pytest.mark.parametrize("change", [drain, end, close])
async def test_whoever_waits_hears_of_a_change_at_once(change: Change) -> None:
    made = joined()
    standing = Standing(made, leads=True)
    waiting = asyncio.create_task(standing.while_ready("i", LONG_SECONDS))
    await asyncio.wait([waiting], timeout=0.02)
    assert not waiting.done()

    change(made, standing)
    await asyncio.wait_for(waiting, 5)


async def test_nobody_waits_for_another_incarnation_or_longer_than_asked() -> None:
    standing = Standing(joined(), leads=True)
    await asyncio.wait_for(standing.while_ready("another", LONG_SECONDS), 5)
    await asyncio.wait_for(standing.while_ready("i", 0.01), 5)


async def test_each_step_of_a_drain_is_news_once_and_gone_with_the_instance() -> None:
    made = joined()
    standing = Standing(made, leads=True)
    assert None is standing.news() is standing.order
    pulse(made, 0)
    pulse(made, 1, draining=False)
    assert [BEGUN, None] == [standing.news(), standing.news()]
    pulse(made, 1, rooms=3)
    assert None is standing.news()
    pulse(made, 1)
    assert [DONE, None, DONE] == [standing.news(), standing.news(), standing.order]

    end(made, standing)
    assert None is standing.news() is standing.order


async def test_only_the_leader_knows_when_the_last_room_has_ended() -> None:
    made = joined()
    standing = Standing(made, leads=False)
    for dp in (0, 1):
        pulse(made, dp)
    assert BEGUN == standing.news()
    standing.hear(DONE)
    assert DONE == standing.news()
