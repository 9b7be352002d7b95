"""Between our ranks and the peers: who may speak to whom, and what becomes known of a peer.

Everything here runs on one event loop and never waits. A peer is identified by the session that
signed. A message of an incarnation that is not the peer's present one is dropped, and so is one
whose return address is no rank of its sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from pdcluster_protocol.authentication import KeyRing
from pdcluster_protocol.control_api import PeersKnown
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.instance import pairing_refusal
from pdcluster_protocol.messages import (
    Inbound,
    InstanceCard,
    NodeMessage,
    Outbound,
    PeerChanged,
    PeerState,
)
from pdcluster_protocol.push.frames import Message
from pdcluster_protocol.push.trailers import Trailer
from pdcluster_protocol.sidecar_messages import InstanceDied, Ping
from pdcluster_sidecar.bus import Bus
from pdcluster_sidecar.client import SidecarClient
from pdcluster_sidecar.context import Context
from pdcluster_sidecar.peers import Peer, PeerTable
from pdcluster_sidecar.ranks import Asker, Ranks
from pdcluster_sidecar.resolver import Resolver, told
from pdcluster_sidecar.telemetry import Dropped

LAST_WORDS_SECONDS: Final = (0.1, 0.3, 1.0)
"""When a death is told again; whoever knows it already ignores the repeat."""
TASKS_MAX: Final = 4096
PODS_KNOW_SECONDS: Final = 0.3
"""A message that overtakes the news of its sender is dropped and comes again, so no more is due."""


class Relay:
    """Passes messages, keeps the peers; implements `RankListener`."""

    def __init__(
        self, context: Context, ring: KeyRing, *, client: SidecarClient, ranks: Ranks
    ) -> None:
        config = context.config
        self.limits: Final = context.limits
        self.peers = PeerTable(context.limits)
        self.resolver = Resolver(
            client,
            self.peers,
            card=ranks.card,
            meet=self.meet,
            plain_peers=config.interop == "Allow",
        )
        self._config = config
        self._ranks = ranks
        self._metrics = context.metrics
        self._log = context.log
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._bus = Bus(
            config.host,
            ring=ring,
            session=context.session,
            deliver=self._deliver,
            metrics=context.metrics,
        )

    def start(self) -> None:
        """Bind the control ports of this pod's ranks.

        Raises:
            ConfigError: one is busy.
        """
        for port in self._config.control_ports:
            self._bus.bind(port)

    async def close(self) -> None:
        """End what is under way and close the sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.resolver.close()
        self._bus.close()

    # --- our ranks ------------------------------------------------------------------------------

    def outbound(self, outbound: Outbound) -> None:
        """A rank sends a message to a peer's rank."""
        peer = self.peers.of_rank(outbound.to)
        if peer is None and self._config.interop != "Allow":
            self._metrics.drop(Dropped.UNKNOWN_PEER)
            return
        self._bus.send(
            outbound.to,
            outbound.message,
            peer_session=None if peer is None else peer.sessions[outbound.to],
            incarnation=self._ranks.instance.incarnation,
        )

    def asked(self, asker: Asker, address: RankAddress) -> None:
        """A rank, or another pod for one of its own, asks who is at this bootstrap address."""
        known = self.resolver.known(address)
        if known is not None:
            asker.send(known)
        else:
            self._spawn(self._resolve(asker, address))

    def renewed(self) -> None:
        """Another pod of ours has a new sidecar, which its peers' sidecars do not know yet."""
        for peer in self.peers.all():
            if peer.state is not PeerState.DEAD:
                self._spawn(self.resolver.greet(peer))

    def drains(self) -> None:
        """Our instance takes nothing new: its peers hear it before the next ping is due."""
        for peer in self.peers.all():
            if peer.state is not PeerState.DEAD:
                self.ping(peer)

    def died(self, death: InstanceDied) -> None:
        """Our instance ended: every peer learns it now, and again in case it was lost."""
        self._ranks.pods.order(death)
        peers = [peer for peer in self.peers.all() if peer.state is not PeerState.DEAD]
        self._tell_death(peers, death)
        for seconds in LAST_WORDS_SECONDS:
            self._loop.call_later(seconds, self._tell_death, peers, death)

    async def _resolve(self, asker: Asker, address: RankAddress) -> None:
        answer = await self.resolver.resolve(address)
        asker.send(answer)
        if answer.card is None:
            self._log.warning(
                "peer not resolved", peer=str(address), reason=answer.reason, detail=answer.detail
            )

    # --- peers ----------------------------------------------------------------------------------

    def answer_hello(self, theirs: InstanceCard) -> InstanceCard:
        """A sidecar or a router said hello over HTTP; what may pair with us becomes a peer."""
        ours = self._ranks.card()
        if not theirs.incarnation or not theirs.ranks or theirs.instance == ours.instance:
            return ours
        refusal = pairing_refusal(ours, theirs)
        if refusal is None:
            self.meet(theirs).told = told(ours)
        else:
            reason, detail = refusal
            self._log.warning("peer refused", peer=theirs.instance, reason=reason, detail=detail)
        return ours

    def meet(self, theirs: InstanceCard) -> Peer:
        """A checked card of somebody who may pair with us.

        Raises:
            Overloaded: there are too many peers.
            RemoteProtocolError: the card is an old one, or names no rank.
        """
        peer, changed = self.peers.meet(theirs, self._loop.time())
        self._ranks.pods.order(PeersKnown((theirs,)))
        self.changed(theirs.instance, changed)
        return peer

    def changed(self, instance: str, changed: PeerChanged | None) -> None:
        """Tell our ranks what became of a peer."""
        if changed is None:
            return
        self._ranks.to_all(changed)
        self._metrics.set_peers(self.peers.counts())
        if changed.state is PeerState.DEAD:
            self._metrics.peer_failures.inc()
        self._log.warning(
            "peer changed",
            peer=instance,
            incarnation=changed.incarnation,
            state=changed.state,
            detail=changed.detail,
        )

    def living_cards(self) -> tuple[InstanceCard, ...]:
        """Of all peers that are not dead."""
        return tuple(p.card for p in self.peers.all() if p.state is not PeerState.DEAD)

    def check_pods(self) -> None:
        """End the instance if one of its pods has been silent for too long."""
        gone = self._ranks.instance.gone(self._loop.time())
        if gone:
            self._ranks.end(gone)

    async def pods_know(self) -> None:
        """Wait, briefly, until our other pods have heard of every peer that was met."""
        await self._ranks.pods.settled(PODS_KNOW_SECONDS)

    def ping(self, peer: Peer) -> None:
        """Tell a peer that we live, and whether our ranks move."""
        ours = self._ranks.instance
        if ours.incarnation:
            message = Ping(ours.incarnation, ours.loops(), ours.draining)
            self._to_sidecar(peer, message, ours.incarnation)

    def greet_again(self, peer: Peer) -> None:
        """Say hello to a peer that fell silent, or that speaks for another incarnation."""
        now = self._loop.time()
        if now >= peer.greeted_at + self.limits.ping_seconds:
            # The next try is a ping later, whatever comes of this one.
            peer.greeted_at = now
            self._spawn(self.resolver.greet(peer))

    def disconnect(self, peer: Peer) -> None:
        """Close the sockets to a peer that is gone, unless another has its addresses by now."""
        for address in peer.addresses:
            if self.peers.of_rank(address) in (None, peer):
                self._bus.disconnect(address)

    # --- arrivals -------------------------------------------------------------------------------

    def _deliver(self, port: int, message: Message, trailer: Trailer | None) -> None:
        if trailer is None:
            if isinstance(message, (Ping, InstanceDied)) or self._config.interop != "Allow":
                self._metrics.drop(Dropped.UNSIGNED)
            else:
                self._ranks.to_port(port, Inbound(message, ""))
            return
        peer = self.peers.of_session(trailer.stamp.sender)
        if peer is None:
            self._metrics.drop(Dropped.UNKNOWN_SESSION)
            return
        peer.node.heard(self._loop.time())
        match message:
            case Ping():
                self._pinged(peer, message)
            case InstanceDied():
                self._peer_died(peer, message)
            case _:
                self._from_rank(port, peer, message, trailer)

    def _pinged(self, peer: Peer, ping: Ping) -> None:
        peer.draining = ping.draining
        if ping.incarnation == peer.card.incarnation:
            changed = peer.node.pinged(ping, self._loop.time())
        elif ping.incarnation in peer.earlier:
            # It was on its way when the new one said hello.
            changed = None
        else:
            changed = peer.node.declared_dead("another incarnation speaks", self._loop.time())
            self.greet_again(peer)
        self.changed(peer.card.instance, changed)

    def _peer_died(self, peer: Peer, death: InstanceDied) -> None:
        if death.incarnation == peer.card.incarnation:
            changed = peer.node.declared_dead(death.detail, self._loop.time())
            self.changed(peer.card.instance, changed)

    def _from_rank(self, port: int, peer: Peer, message: NodeMessage, trailer: Trailer) -> None:
        if trailer.incarnation != peer.card.incarnation:
            self._metrics.drop(Dropped.STALE_INCARNATION)
            self.greet_again(peer)
            return
        if peer.state is PeerState.DEAD:
            self._metrics.drop(Dropped.STALE_INCARNATION)
            return
        reply_to = getattr(message, "reply_to", None)
        if reply_to is not None and reply_to not in peer.addresses:
            self._metrics.drop(Dropped.FOREIGN_ADDRESS)
            return
        self._ranks.to_port(port, Inbound(message, trailer.incarnation))

    # --- details --------------------------------------------------------------------------------

    def _tell_death(self, peers: list[Peer], death: InstanceDied) -> None:
        for peer in peers:
            self._to_sidecar(peer, death, death.incarnation)

    def _to_sidecar(self, peer: Peer, message: Message, incarnation: str) -> None:
        self._bus.send(
            peer.control, message, peer_session=peer.card.session, incarnation=incarnation
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if len(self._tasks) >= TASKS_MAX:
            work.close()
            self._metrics.drop(Dropped.PEER_FULL)
            return
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
