"""The leader's word on a rank that waits, whatever became of the rank meanwhile."""

from __future__ import annotations

from typing import cast

import structlog

from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import EngineHello, HelloAnswer
from pdcluster_protocol.sidecar_messages import InstanceDied
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from pdcluster_sidecar.context import Context
from pdcluster_sidecar.link import Link
from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.relay import Relay
from pdcluster_sidecar.telemetry import Metrics
from support.sidecars import hello_of

CONFIG = SidecarConfig(
    cluster="c",
    instance="c-prefill-0",
    role=Role.PREFILL,
    host="127.64.0.2",
    link_path="",
    keys_folder="",
    fingerprint="f",
    parallel=Parallelism(tp=2, dp=2),
    nodes=2,
    node=1,
    leader=RankAddress("127.64.0.1", 8998),
)
PLACE = RankCoordinate(dp=1)
WORD = HelloAnswer("i-1", RankAddress("127.64.0.2", 9001))


class FakeLink:
    """A link that says what it was told."""

    pid = 1
    open = True
    coordinate: RankCoordinate | None = None

    def __init__(self) -> None:
        self.told: list[object] = []

    def send(self, message: object) -> bool:
        self.told.append(message)
        return True


class Told:
    """What the relay would tell the leader."""

    def __init__(self) -> None:
        self.deaths: list[InstanceDied] = []
        self.wakes = 0

    def died(self, death: InstanceDied) -> None:
        self.deaths.append(death)

    def wake(self) -> None:
        self.wakes += 1

    def unready(self) -> str:
        return "the leader is silent"


def waiting() -> tuple[Ranks, FakeLink, Told, EngineHello]:
    """A pod that does not lead, with one rank that has said hello."""
    ranks = Ranks(Context(CONFIG, "s", Limits(), Metrics(), structlog.get_logger()))
    told, link = Told(), FakeLink()
    ranks.upstream, ranks.listener = told, cast("Relay", told)
    hello = hello_of(CONFIG, coordinate=PLACE)
    ranks.greeted(cast("Link", link), hello)
    assert (1, []) == (told.wakes, link.told)
    return ranks, link, told, hello


async def test_a_rank_that_waits_is_let_in_with_the_leaders_incarnation() -> None:
    ranks, link, _, hello = waiting()
    ranks.answered(PLACE, WORD, session=hello.session)

    assert [WORD] == link.told
    assert (PLACE, "i-1", {}) == (link.coordinate, ranks.instance.incarnation, ranks.waiting)
    assert "the leader is silent" == ranks.unready()


async def test_a_rank_that_ended_while_it_waited_is_told_to_the_leader_as_a_death() -> None:
    ranks, link, told, hello = waiting()
    link.open = False
    ranks.answered(PLACE, WORD, session=hello.session)

    assert ["i-1"] == [death.incarnation for death in told.deaths]
    assert ({}, {}) == (ranks.waiting, ranks.instance.members)


async def test_a_word_on_the_process_before_lets_nobody_in() -> None:
    ranks, link, told, _ = waiting()
    ranks.answered(PLACE, WORD, session="the process before")

    assert [] == link.told == told.deaths
    assert [PLACE] == list(ranks.waiting)
