"""What a peer says, in whichever order it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
import structlog

from pdcluster_protocol.authentication import HttpSigner, HttpVerifier, Stamp
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import InstanceCard, PeerState, RankCard
from pdcluster_protocol.push.trailers import Trailer
from pdcluster_protocol.sidecar_messages import Ping, SidecarMessage
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar.client import SidecarClient
from pdcluster_sidecar.context import Context
from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.relay import Relay
from pdcluster_sidecar.telemetry import Metrics
from support.sidecars import RING

CONFIG = SidecarConfig(
    cluster="c",
    instance="c-decode-0",
    role=Role.DECODE,
    host="127.64.0.2",
    link_path="",
    keys_folder="",
    fingerprint="f",
)
SESSION = "their-sidecar"
"""It lives on while its engine is replaced."""


@pytest_asyncio.fixture
async def relay() -> AsyncIterator[Relay]:
    context = Context(CONFIG, "ours", Limits(), Metrics(), structlog.get_logger())
    client = SidecarClient(HttpSigner(RING, "ours"), HttpVerifier(RING))
    ranks = Ranks(context)
    relay = ranks.listener = Relay(context, RING, client=client, ranks=ranks)
    yield relay
    await relay.close()
    await client.close()


def meet(relay: Relay, incarnation: str) -> None:
    address = RankAddress("127.64.0.1", 9000)
    relay.meet(
        InstanceCard(
            cluster="c",
            instance="c-prefill-0",
            role="prefill",
            incarnation=incarnation,
            session=SESSION,
            http=RankAddress("127.64.0.1", 8998),
            ranks=(RankCard(RankCoordinate(), address, 30000),),
        )
    )


def hear(relay: Relay, message: SidecarMessage) -> None:
    stamp = Stamp("k1", SESSION, "ours/9000", 1)
    relay._deliver(9000, message, Trailer(1, stamp, message.incarnation))


def state(relay: Relay) -> PeerState:
    (peer,) = relay.peers.all()
    return peer.state


async def test_a_ping_of_the_incarnation_before_ends_nobody(relay: Relay) -> None:
    meet(relay, "i-1")
    meet(relay, "i-2")
    hear(relay, Ping("i-1", (7,)))

    assert PeerState.ALIVE is state(relay)


async def test_a_ping_of_an_incarnation_that_nobody_met_proves_a_death(relay: Relay) -> None:
    meet(relay, "i-1")
    hear(relay, Ping("i-2", (7,)))

    assert PeerState.DEAD is state(relay)
