"""Our own engine's ranks: who is linked, what they are together, and the end of them.

A rank is identified by its link. When a link closes its process is dead, and with it the instance:
the other links are closed too, since their engines' rooms have been declared dead to every peer.

In an instance of several pods the leader lets in the ranks of all of them. Another pod's sidecar
holds the links of its own ranks and passes their hellos on; until the leader's word comes a rank
waits. Whatever is said to all ranks is said to the other pods' too.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final, NamedTuple, Protocol, assert_never

from pdcluster_protocol.control_api import PodCard
from pdcluster_protocol.errors import PDClusterError
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.instance import InstanceNode, InstancePlan
from pdcluster_protocol.messages import (
    CancelLeg,
    Drain,
    DumpAnswered,
    DumpRequested,
    EngineHello,
    EngineToSidecar,
    HelloAnswer,
    Inbound,
    InstanceCard,
    Outbound,
    PeerChanged,
    Pulse,
    Resolve,
    Resolved,
)
from pdcluster_protocol.push.registration import registration_of
from pdcluster_protocol.push.registry import RegistryNode
from pdcluster_protocol.sidecar_messages import InstanceDied
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar.context import Context
from pdcluster_sidecar.link import Link
from pdcluster_sidecar.pods import Pods
from pdcluster_sidecar.standing import Standing
from pdcluster_sidecar.telemetry import Dropped

HELLO_AGAIN_SECONDS: Final = 0.1
HELLO_TRIES: Final = 10
DUMP_SECONDS: Final = 2.0


class Asker(Protocol):
    """Where the answer to a question goes."""

    def send(self, message: Resolved) -> bool:
        """Queue the answer; False when it cannot be taken."""


class RankListener(Protocol):
    """Who acts on what the ranks want from the world."""

    def outbound(self, outbound: Outbound) -> None:
        """A rank sends a message to a peer's rank."""

    def asked(self, asker: Asker, address: RankAddress) -> None:
        """A rank asks who is at this bootstrap address."""

    def died(self, death: InstanceDied) -> None:
        """The instance ended."""

    def renewed(self) -> None:
        """A rank came again through another sidecar of ours."""

    def drains(self) -> None:
        """The instance takes nothing new."""


class Upstream(Protocol):
    """The leader, as a pod that does not lead sees it."""

    def wake(self) -> None:
        """There is something to tell."""

    def unready(self) -> str:
        """Why the leader cannot be relied on now; "" when it can."""


class Waiting(NamedTuple):
    """A rank that has said hello and waits for the leader's word."""

    link: Link
    hello: EngineHello


class Ranks:
    """The links of one instance; implements `LinkOwner`."""

    def __init__(self, context: Context) -> None:
        self.plan = _plan(context)
        self.instance = InstanceNode(self.plan, context.limits)
        self.standing = Standing(self.instance, leads=self.plan.node == 0)
        self.pods = Pods(context.session, context.metrics)
        """The other pods; none unless this one leads several."""
        self.upstream: Upstream | None = None
        """The leader, where this pod does not lead."""
        self.waiting: dict[RankCoordinate, Waiting] = {}
        self.registry = RegistryNode()
        self.listener: RankListener
        """Set before the first link can open."""
        self._config = context.config
        self._metrics = context.metrics
        self._log = context.log
        self._links: dict[RankCoordinate, Link] = {}
        self._by_port: dict[int, Link] = {}
        self._dumps: dict[int, asyncio.Future[bytes]] = {}
        self._dump_count = 0
        self._loop = asyncio.get_running_loop()

    def card(self) -> InstanceCard:
        """Who we are."""
        return self.instance.card(self._loop.time())

    def unready(self) -> str:
        """Why this pod cannot serve a request now; "" when it can."""
        why = self.instance.unready(self._loop.time())
        return why or ("" if self.upstream is None else self.upstream.unready())

    # --- what links say -------------------------------------------------------------------------

    def greeted(self, link: Link, hello: EngineHello) -> None:
        """A rank said hello."""
        self._greeted(link, hello, HELLO_TRIES)

    def said(self, link: Link, message: EngineToSidecar) -> None:
        """A rank said something."""
        match message:
            case Outbound():
                self.listener.outbound(message)
            case Resolve():
                self.listener.asked(link, RankAddress(message.host, message.port))
            case Pulse():
                if link.coordinate is not None:
                    self.pulsed(link.coordinate, message)
            case DumpAnswered():
                self._described(message)
            case EngineHello():
                link.close("a second hello on one connection")
            case _:
                assert_never(message)

    def closed(self, link: Link, detail: str) -> None:
        """A link ended: the engine is dead, and with it its instance."""
        coordinate = link.coordinate
        if coordinate is None or self._links.get(coordinate) is not link:
            return
        self._log.error("engine died", dp_rank=coordinate.dp, pid=link.pid, detail=detail)
        del self._links[coordinate]
        self.end(detail)

    # --- membership -----------------------------------------------------------------------------

    def join(self, hello: EngineHello, pod: PodCard | None = None) -> HelloAnswer:
        """Let a rank in, or refuse it; `pod` is another pod that it is in."""
        why = self.instance.proves_death(hello)
        if why:
            self.end(why)
        before = self.instance.incarnation
        known = self.instance.members.get(hello.coordinate)
        answer = self.instance.join(
            hello, minted=secrets.token_hex(8), now=self._loop.time(), pod=pod
        )
        if answer.refused:
            return answer
        self.standing.wake()
        if self._config.role is Role.PREFILL:
            self._register(hello, answer, begin=before != answer.incarnation)
        if pod is not None:
            self._log.info(
                "rank joined",
                node=pod.node,
                dp_rank=hello.coordinate.dp,
                incarnation=answer.incarnation,
            )
            if known is not None and known.pod.session != pod.session:
                self.listener.renewed()
        return answer

    def answered(self, coordinate: RankCoordinate, answer: HelloAnswer, *, session: str) -> None:
        """The leader's word on a rank that waits, whose process has this session."""
        link, hello = self.waiting[coordinate]
        if hello.session != session:
            # Meanwhile another process greeted in its place; its own answer follows.
            return
        del self.waiting[coordinate]
        if not link.open:
            if not answer.refused:
                # The leader counts on it by now, and nobody else will miss it.
                gone = f"{self._config.instance}: a rank ended while it joined"
                self.listener.died(InstanceDied(answer.incarnation, gone))
            return
        if not answer.refused:
            if self.instance.incarnation not in ("", answer.incarnation):
                self.end(f"the leader has begun incarnation {answer.incarnation}")
            now = self._loop.time()
            answer = self.instance.join(hello, minted=answer.incarnation, now=now)
        self._admit(link, hello, answer)

    def end(self, detail: str) -> None:
        """The instance ended: tell its peers and its other pods, and end its other ranks."""
        ended = self.instance.end()
        links = list(self._links.values())
        self._links.clear()
        self._by_port.clear()
        self.registry.forget()
        self.standing.reset()
        self._metrics.set_ranks(0)
        if ended:
            self._metrics.engine_deaths.inc()
            # The peers first: every millisecond counts for those who wait for us.
            self.listener.died(InstanceDied(ended, f"{self._config.instance}: {detail}"))
            self._log.error("instance ended", incarnation=ended, detail=detail)
        for link in links:
            link.coordinate = None
            link.close("another rank of the instance died")

    # --- draining -------------------------------------------------------------------------------

    def pulsed(self, coordinate: RankCoordinate, pulse: Pulse) -> None:
        """A rank of this or of another pod tells that it lives, and whether it drains."""
        self.instance.pulse(coordinate, pulse, self._loop.time())
        order = self.standing.order
        link = self._links.get(coordinate)
        if link is not None and order is not None and (order.done or not pulse.draining):
            # It came late, or did not hear it.
            link.send(order)
        self._drain_on()

    def leader_drains(self, order: Drain | None) -> None:
        """The leader's word on the drain of all pods."""
        self.standing.hear(order)
        self._drain_on()

    def _drain_on(self) -> None:
        order = self.standing.news()
        if order is not None:
            self._log.info("instance drains", reason=order.reason, done=order.done)
            self.to_own(order)
            self.listener.drains()

    # --- what is said to them -------------------------------------------------------------------

    def to_all(self, message: PeerChanged | CancelLeg) -> int:
        """Tell all ranks of the instance; gives how many were told."""
        self.pods.order(message)
        return self.to_own(message) + len(self.instance.members) - len(self._links)

    def to_own(self, message: PeerChanged | CancelLeg | Drain) -> int:
        """Tell the ranks of this pod; gives how many were told."""
        sent = 0
        for link in self._links.values():
            if link.send(message):
                sent += 1
            else:
                self._metrics.drop(Dropped.LINK_FULL)
        return sent

    def to_port(self, port: int, message: Inbound) -> None:
        """Tell the rank whose control port this is."""
        link = self._by_port.get(port)
        if link is None:
            self._metrics.drop(Dropped.NO_ENGINE)
        elif link.send(message):
            self._metrics.received.inc()
        else:
            self._metrics.drop(Dropped.LINK_FULL)

    async def dump(self) -> dict[RankCoordinate, bytes]:
        """What each rank says of itself, as JSON; ranks that do not answer in time are absent."""
        others = asyncio.ensure_future(self.pods.dump(DUMP_SECONDS))
        waiting: dict[RankCoordinate, asyncio.Future[bytes]] = {}
        numbers = []
        for coordinate, link in self._links.items():
            self._dump_count += 1
            numbers.append(self._dump_count)
            waiting[coordinate] = self._dumps[self._dump_count] = self._loop.create_future()
            link.send(DumpRequested(self._dump_count))
        if waiting:
            await asyncio.wait(waiting.values(), timeout=DUMP_SECONDS)
        for number in numbers:
            self._dumps.pop(number, None)
        own = {place: answer.result() for place, answer in waiting.items() if answer.done()}
        return own | await others

    # --- details --------------------------------------------------------------------------------

    def _described(self, answer: DumpAnswered) -> None:
        waiting = self._dumps.pop(answer.request, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.json)

    def _greeted(self, link: Link, hello: EngineHello, tries: int) -> None:
        if not link.open:
            return
        if hello.coordinate in self._links and tries > 0:
            # It was restarted, and the end of its old link is not read yet.
            self._loop.call_later(HELLO_AGAIN_SECONDS, self._greeted, link, hello, tries - 1)
            return
        if hello.coordinate in self._links:
            self._refuse(link, hello, f"rank {hello.coordinate} is linked already")
            return
        if self.upstream is None:
            self._admit(link, hello, self.join(hello))
        else:
            self._pass_on(link, hello, self.upstream)

    def _pass_on(self, link: Link, hello: EngineHello, upstream: Upstream) -> None:
        refused = self.instance.refusal(hello, node=self.plan.node)
        if refused:
            self._refuse(link, hello, refused)
            return
        if hello.tokenizer_files:
            self.instance.tokenizer = (hello.tokenizer_digest, dict(hello.tokenizer_files))
        self.waiting[hello.coordinate] = Waiting(link, hello)
        upstream.wake()

    def _admit(self, link: Link, hello: EngineHello, answer: HelloAnswer) -> None:
        if answer.refused:
            self._refuse(link, hello, answer.refused)
            return
        link.coordinate = hello.coordinate
        self._links[hello.coordinate] = link
        self._by_port[answer.address.port] = link
        self._metrics.set_ranks(len(self._links))
        link.send(answer)
        self._log.info(
            "rank joined",
            dp_rank=hello.coordinate.dp,
            incarnation=answer.incarnation,
            pid=link.pid,
            rooms=len(hello.rooms),
        )

    def _register(self, hello: EngineHello, answer: HelloAnswer, *, begin: bool) -> None:
        if begin:
            self.registry.begin(answer.incarnation)
        try:
            self.registry.register(registration_of(hello, answer.address, answer.incarnation))
        except PDClusterError as error:
            self._log.error("rank not registered", dp_rank=hello.coordinate.dp, detail=error.detail)

    def _refuse(self, link: Link, hello: EngineHello, why: str) -> None:
        address = RankAddress(self._config.host, self._config.control_port)
        link.send(HelloAnswer("", address, why))
        link.close(why)
        self._log.error("rank refused", dp_rank=hello.coordinate.dp, pid=link.pid, detail=why)


def _plan(context: Context) -> InstancePlan:
    config = context.config
    return InstancePlan(
        cluster=config.cluster,
        instance=config.instance,
        role=config.role,
        parallel=config.parallel,
        allocation=config.allocation,
        fingerprint=config.fingerprint,
        http=RankAddress(config.host, config.http_port),
        control_port=config.control_port,
        session=context.session,
        nodes=config.nodes,
        node=config.node,
    )
