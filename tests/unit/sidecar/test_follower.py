"""A pod that does not lead asks its leader, whatever order the answers come in."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import structlog

from pdcluster_protocol.authentication import HttpSigner, HttpVerifier
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.control_api import PeersKnown, PodReport
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import InstanceCard, PeerChanged, PeerState, RankCard, Resolved
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from pdcluster_sidecar.client import SidecarClient
from pdcluster_sidecar.context import Context
from pdcluster_sidecar.follower import FollowerRelay
from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.telemetry import Metrics
from support.sidecars import RING

LEADER = RankAddress("127.64.0.1", 8998)
CONFIG = SidecarConfig(
    cluster="c",
    instance="c-decode-0",
    role=Role.DECODE,
    host="127.64.0.2",
    link_path="",
    keys_folder="",
    fingerprint="f",
    parallel=Parallelism(tp=2, dp=2),
    nodes=2,
    node=1,
    leader=LEADER,
)
ASKED = RankAddress("127.64.0.9", 8998)
ANSWER = Resolved(ASKED.host, ASKED.port, None, reason=Reason.NOT_READY)


class Asker:
    """A rank."""

    def __init__(self) -> None:
        self.heard: list[Resolved] = []

    def send(self, message: Resolved) -> bool:
        self.heard.append(message)
        return True


class Relaying:
    """The relay of a pod, with one rank that asks."""

    def __init__(self, relay: FollowerRelay) -> None:
        self.relay = relay
        self.asker = Asker()

    def ask(self) -> None:
        self.relay.asked(self.asker, ASKED)

    def report(self) -> PodReport:
        """The next report, as it leaves."""
        report = PodReport(
            cluster="c",
            instance="c-decode-0",
            pod=self.relay._ranks.plan.pod,
            questions=self.relay.due_questions(),
        )
        self.relay.reporting(report)
        return report


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[Relaying]:
    context = Context(CONFIG, "ours", Limits(), Metrics(), structlog.get_logger())
    client = SidecarClient(HttpSigner(RING, "ours"), HttpVerifier(RING))
    relay = FollowerRelay(context, RING, client=client, ranks=Ranks(context), leader=LEADER)
    yield Relaying(relay)
    await relay.close()
    await client.close()


async def test_a_question_is_asked_in_one_report_and_answered_once(pod: Relaying) -> None:
    pod.ask()

    assert (ASKED,) == pod.report().questions
    assert () == pod.report().questions
    pod.relay.obey(ANSWER)
    assert [ANSWER] == pod.asker.heard


async def test_an_answer_that_overtakes_the_reports_own_lets_the_next_question_out(
    pod: Relaying,
) -> None:
    pod.ask()
    report = pod.report()
    pod.relay.obey(ANSWER)
    pod.relay.reported(report)
    pod.ask()

    assert (ASKED,) == pod.report().questions


async def test_what_was_asked_in_a_lost_report_is_asked_in_the_next_one(pod: Relaying) -> None:
    pod.ask()
    pod.relay.unheard(pod.report())

    assert (ASKED,) == pod.report().questions


async def test_a_death_whose_order_was_lost_is_told_by_its_successors_card(
    pod: Relaying, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(pod.relay._ranks, "to_own", told.append)
    for incarnation in ("i-1", "i-2"):
        ranks = (RankCard(RankCoordinate(), ASKED, 30000),)
        card = InstanceCard("c", "p-0", "prefill", incarnation, "s", ASKED, ranks=ranks)
        assert pod.relay.obey(PeersKnown((card,))) is None

    died = PeerChanged("i-1", PeerState.DEAD, "another incarnation took its place")
    assert [died] == told
