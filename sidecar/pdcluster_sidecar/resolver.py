"""Answering an engine's question: who is the prefill instance at this bootstrap address?

The answer comes from a signed hello, in which both sides learn each other's card and compare what
shapes bytes before any page is reserved. It is kept per address while that incarnation lives. A
host that does not answer a hello is asked for `/route` only where interop allows plain peers: an
address from a request must not make us call whatever is there.

An instance that drains is named too. It finishes the rooms whose leg it has taken, and refuses the
others by name itself: only it knows which are which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from pdcluster_protocol.errors import Overloaded, PDClusterError, Reason
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.instance import pairing_refusal
from pdcluster_protocol.messages import InstanceCard, PeerState, Resolved
from pdcluster_sidecar.client import Refused, SidecarClient
from pdcluster_sidecar.peers import Peer, PeerTable

CALLS_MAX: Final = 256
RESOLVE_SECONDS: Final = 4.0

Meet = Callable[[InstanceCard], Peer]


class Resolver:
    """One call per address at a time, whoever asks."""

    def __init__(
        self,
        client: SidecarClient,
        peers: PeerTable,
        *,
        card: Callable[[], InstanceCard],
        meet: Meet,
        plain_peers: bool,
    ) -> None:
        self._client = client
        self._peers = peers
        self._card = card
        self._meet = meet
        self._plain_peers = plain_peers
        self._calls: dict[RankAddress, asyncio.Task[InstanceCard]] = {}

    def known(self, address: RankAddress) -> Resolved | None:
        """The answer, where no call is needed."""
        ours = self._card()
        if address == ours.http:
            return _answer(address, ours, ours)
        peer = self._peers.of_bootstrap(address)
        if peer is None or peer.state is not PeerState.ALIVE or peer.told != told(ours):
            return None
        if not peer.card.ready:
            return None
        return _answer(address, ours, peer.card)

    async def resolve(self, address: RankAddress) -> Resolved:
        """The answer, after a hello if one is needed; never raises."""
        known = self.known(address)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                theirs = await asyncio.shield(self._call(address))
        except TimeoutError:
            detail = f"{address} did not answer within {RESOLVE_SECONDS:g} s"
            return _refusal(address, Reason.PEER_UNREACHABLE, detail)
        except PDClusterError as error:
            return _refusal(address, error.reason, error.detail)
        return _answer(address, self._card(), theirs)

    async def greet(self, peer: Peer) -> None:
        """Say hello to a known peer again; whoever does not answer is left to its clocks."""
        try:
            await asyncio.shield(self._call(peer.card.http))
        except PDClusterError:
            return

    async def close(self) -> None:
        """End the calls under way."""
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _call(self, address: RankAddress) -> asyncio.Task[InstanceCard]:
        call = self._calls.get(address)
        if call is None:
            if len(self._calls) >= CALLS_MAX:
                raise Overloaded(f"{CALLS_MAX} hellos are under way; try again")
            call = asyncio.get_running_loop().create_task(self._hello(address))
            self._calls[address] = call
            call.add_done_callback(lambda done: self._done(address, done))
        return call

    def _done(self, address: RankAddress, call: asyncio.Task[InstanceCard]) -> None:
        self._calls.pop(address, None)
        if not call.cancelled():
            # Retrieved here, since everybody who asked may have stopped waiting.
            call.exception()

    async def _hello(self, address: RankAddress) -> InstanceCard:
        ours = self._card()
        try:
            theirs = await self._client.hello(address, ours)
        except Refused as refused:
            # Plain registries know no such path.
            if not self._plain_peers or refused.status not in {404, 405}:
                raise
            return await self._client.plain_card(address)
        if theirs.incarnation and pairing_refusal(ours, theirs) is None:
            peer = self._meet(theirs)
            peer.told = told(ours)
            self._peers.remember_bootstrap(address, peer)
        return theirs


def told(ours: InstanceCard) -> object:
    """What of our card a peer needs to know: when it changes, we say hello again."""
    return ours.incarnation, ours.session, ours.ranks


def _answer(address: RankAddress, ours: InstanceCard, theirs: InstanceCard) -> Resolved:
    plain = theirs.wire_max == 0
    refusal = None if plain else pairing_refusal(ours, theirs)
    if refusal is not None:
        return _refusal(address, *refusal)
    if theirs.role != Role.PREFILL:
        detail = f"{theirs.instance} at {address} has the role {theirs.role}; it must be prefill"
        return _refusal(address, Reason.INVALID_REQUEST, detail)
    if not theirs.ready:
        detail = f"{theirs.instance} at {address} is not ready"
        return _refusal(address, Reason.NOT_READY, detail)
    return Resolved(address.host, address.port, theirs, trusted=not plain)


def _refusal(address: RankAddress, reason: Reason, detail: str) -> Resolved:
    return Resolved(address.host, address.port, None, reason=reason, detail=detail)
