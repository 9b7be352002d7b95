"""The peer instances that this sidecar knows: met through a signed hello, left when they are dead.

A peer is one incarnation behind one sidecar session. It is found by what a message carries: the
sender's session, the address of a rank, or the address at which a router says that it is. Every way
to it ends with it, so a restarted peer behind an old address is met anew.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Final

from pdcluster_protocol.errors import Overloaded, Reason, RemoteProtocolError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.liveness import PeerNode
from pdcluster_protocol.messages import InstanceCard, PeerChanged, PeerState

DEAD_KEPT_SECONDS: Final = 60.0
"""How long a dead peer is still shown, and repeats of its last words are recognised."""
ALIASES_MAX: Final = 4096
EARLIER_MAX: Final = 8
"""Incarnations of one instance that are known to be over, the newest last."""


class Peer:
    """One incarnation of a peer instance."""

    __slots__ = (
        "card",
        "died_at",
        "draining",
        "earlier",
        "greeted_at",
        "node",
        "sessions",
        "told",
    )

    def __init__(
        self, card: InstanceCard, limits: Limits, *, now: float, earlier: tuple[str, ...] = ()
    ) -> None:
        self.node = PeerNode(card.incarnation, limits, now=now)
        self.earlier: Final = earlier
        """In whose place it came. What they said may arrive after their successor's hello, since a
        ping and an answer to a hello go separate ways."""
        self.died_at: float | None = None
        self.draining = card.draining
        self.told: object = None
        """What it knows of us: who changed since must say hello again before sending."""
        self.update(card, now)

    def update(self, card: InstanceCard, now: float) -> None:
        """The same incarnation said hello again, maybe from a restarted sidecar."""
        self.card = card
        self.sessions = {rank.address: rank.session or card.session for rank in card.ranks}
        """Of the sidecar behind each rank's address: an instance may have several pods."""
        self.draining = card.draining
        self.greeted_at = now
        self.node.heard(now)

    @property
    def addresses(self) -> Collection[RankAddress]:
        """Where its ranks are reached."""
        return self.sessions.keys()

    @property
    def control(self) -> RankAddress:
        """Where its own sidecar, which speaks for all of its pods, is reached."""
        leading = (a for a, session in self.sessions.items() if session == self.card.session)
        return next(leading, self.card.ranks[0].address)

    @property
    def state(self) -> PeerState:
        """Alive, unknown or dead."""
        return self.node.state


class PeerTable:
    """All peers, and the ways to find one."""

    __slots__ = ("_aliases", "_by_address", "_by_instance", "_by_session", "_limits")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_instance: dict[str, Peer] = {}
        self._by_session: dict[str, Peer] = {}
        self._by_address: dict[RankAddress, Peer] = {}
        self._aliases: OrderedDict[RankAddress, str] = OrderedDict()

    def meet(self, card: InstanceCard, now: float) -> tuple[Peer, PeerChanged | None]:
        """A peer said hello; also gives the death of the incarnation that it had before, if any.

        Raises:
            Overloaded: as many peers as there may be are alive.
            RemoteProtocolError: the card is an old one, since its instance has begun anew; or it
                names no rank.
        """
        if not card.ranks:
            raise RemoteProtocolError(f"ranks: the card of {card.instance} names none")
        known = self._by_instance.get(card.instance)
        changed = None
        earlier: tuple[str, ...] = ()
        if known is not None and known.card.incarnation == card.incarnation:
            if known.state is not PeerState.DEAD:
                self._unlink(known)
                known.update(card, now)
                self._link(known)
                return known, None
            # It only fell silent, and now it speaks again.
            earlier = known.earlier
            self.drop(known)
        elif known is not None and card.incarnation in known.earlier:
            raise RemoteProtocolError(
                f"incarnation {card.incarnation} of {card.instance} has ended;"
                f" {known.card.incarnation} has taken its place",
                reason=Reason.PEER_DIED,
            )
        elif known is not None:
            changed = known.node.declared_dead("another incarnation took its place", now)
            earlier = (*known.earlier, known.card.incarnation)[-EARLIER_MAX:]
            self.drop(known)
        self._make_room()
        peer = Peer(card, self._limits, now=now, earlier=earlier)
        self._by_instance[card.instance] = peer
        self._link(peer)
        return peer, changed

    def drop(self, peer: Peer) -> None:
        """Forget a peer and every way to it."""
        self._unlink(peer)
        if self._by_instance.get(peer.card.instance) is peer:
            del self._by_instance[peer.card.instance]

    def expire(self, now: float) -> list[Peer]:
        """Drop those that have been dead for long enough, and give them."""
        gone = []
        for peer in list(self._by_instance.values()):
            if peer.state is PeerState.DEAD:
                peer.died_at = now if peer.died_at is None else peer.died_at
                if now >= peer.died_at + DEAD_KEPT_SECONDS:
                    self.drop(peer)
                    gone.append(peer)
        return gone

    def all(self) -> tuple[Peer, ...]:
        """Every peer, the dead ones that are still shown too."""
        return tuple(self._by_instance.values())

    def of_session(self, session: str) -> Peer | None:
        """Whose sidecar, in whichever of its pods, this session is."""
        return self._by_session.get(session)

    def of_incarnation(self, incarnation: str) -> Peer | None:
        """Whose present incarnation this is."""
        return next((p for p in self.all() if p.card.incarnation == incarnation), None)

    def of_rank(self, address: RankAddress) -> Peer | None:
        """Who has a rank at this address."""
        return self._by_address.get(address)

    def of_bootstrap(self, address: RankAddress) -> Peer | None:
        """Who answered at this HTTP address before."""
        instance = self._aliases.get(address)
        peer = None if instance is None else self._by_instance.get(instance)
        return peer if peer is not None and peer.state is not PeerState.DEAD else None

    def remember_bootstrap(self, address: RankAddress, peer: Peer) -> None:
        """This peer answered at this HTTP address."""
        self._aliases[address] = peer.card.instance
        self._aliases.move_to_end(address)
        if len(self._aliases) > ALIASES_MAX:
            self._aliases.popitem(last=False)

    def counts(self) -> dict[PeerState, int]:
        """Peers by state."""
        return dict(Counter(peer.state for peer in self._by_instance.values()))

    def _link(self, peer: Peer) -> None:
        for session in (peer.card.session, *peer.sessions.values()):
            self._by_session[session] = peer
        for address in peer.addresses:
            self._by_address[address] = peer

    def _unlink(self, peer: Peer) -> None:
        for session in (peer.card.session, *peer.sessions.values()):
            if self._by_session.get(session) is peer:
                del self._by_session[session]
        for address in peer.addresses:
            if self._by_address.get(address) is peer:
                del self._by_address[address]

    def _make_room(self) -> None:
        if len(self._by_instance) < self._limits.peers_max:
            return
        dead = next((p for p in self._by_instance.values() if p.state is PeerState.DEAD), None)
        if dead is None:
            raise Overloaded(f"{self._limits.peers_max} peers are known; none of them is dead")
        self.drop(dead)
