"""The pulse between sidecars: ping every known peer, notice who falls silent, ask who it is now.

A peer that is silent for longer than a ping is greeted again: its sidecar may have been restarted,
and knows neither us nor our sessions until somebody says hello.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pdcluster_protocol.messages import PeerState
from pdcluster_sidecar.peers import Peer
from pdcluster_sidecar.relay import Relay
from pdcluster_sidecar.telemetry import Metrics

SILENT_PINGS: Final = 1.5
"""After so many ping intervals without a word a peer is greeted again."""
PAUSE_SECONDS_MIN: Final = 0.02
LATE_SECONDS: Final = 0.25


async def beat(relay: Relay, metrics: Metrics) -> None:
    """Run for ever."""
    loop = asyncio.get_running_loop()
    limits = relay.limits
    ping_at = loop.time()
    while True:
        now = loop.time()
        pinging = now >= ping_at
        if pinging:
            ping_at = now + limits.ping_seconds
        relay.check_pods()
        for peer in relay.peers.all():
            _attend(relay, peer, now, pinging=pinging)
        for gone in relay.peers.expire(now):
            relay.disconnect(gone)
        metrics.set_peers(relay.peers.counts())
        due = [peer.node.deadline() for peer in relay.peers.all()]
        next_at = min([ping_at, *(at for at in due if at is not None)])
        await asyncio.sleep(max(PAUSE_SECONDS_MIN, next_at - loop.time()))
        if loop.time() - next_at > LATE_SECONDS:
            # We were starved, not they silent: first read what came meanwhile, then judge.
            await asyncio.sleep(PAUSE_SECONDS_MIN)


def _attend(relay: Relay, peer: Peer, now: float, *, pinging: bool) -> None:
    relay.changed(peer.card.instance, peer.node.tick(now))
    if peer.state is PeerState.DEAD:
        return
    if pinging:
        relay.ping(peer)
    if now >= peer.node.heard_at + SILENT_PINGS * relay.limits.ping_seconds:
        relay.greet_again(peer)
