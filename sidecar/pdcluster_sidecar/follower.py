"""A pod that does not lead: it tells the leader what its ranks say, and does what it orders.

Two calls are always under way. A report carries everything, every time, so nothing depends on one
of them; a call for orders is held at the leader. Messages between ranks do not pass the leader:
this pod has its own control ports, and learns from the leader who its peers are.

The leader's silence ends nothing at once, since a sidecar may be restarted under living ranks. When
it has lasted as long as a peer's that counts as dead, the ranks here are ended: nobody speaks for
them any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, TypeVar, assert_never

import msgspec

from pdcluster_protocol.authentication import KeyRing
from pdcluster_protocol.control_api import (
    Dump,
    Order,
    Orders,
    OrdersAsked,
    PeersKnown,
    PodAnswer,
    PodReport,
    decode_pod_body,
)
from pdcluster_protocol.errors import NotReady, PDClusterError, WireError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import (
    CancelLeg,
    DumpRequested,
    InstanceCard,
    PeerChanged,
    PeerState,
    Resolved,
)
from pdcluster_protocol.sidecar_messages import InstanceDied
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_sidecar.client import SidecarClient
from pdcluster_sidecar.context import Context
from pdcluster_sidecar.peers import Peer
from pdcluster_sidecar.ranks import Asker, Ranks
from pdcluster_sidecar.relay import Relay

REPORT_PATH: Final = "/pd/v1/pod/report"
ORDERS_PATH: Final = "/pd/v1/pod/orders"
BEAT_SECONDS: Final = 0.2
AGAIN_SECONDS: Final = 0.1
"""After a failed call; a leader that is restarted is met soon."""
KNOWN_SECONDS: Final = 1.0
"""How long the leader's answer to a question holds."""
ASK_AGAIN_SECONDS: Final = 5.0
"""Longer than the leader tries to answer a question."""
ENDED_MAX: Final = 8
QUESTIONS_MAX: Final = 256
DUMP_BYTES_MAX: Final = 1 << 20
"""Of one rank; a report must stay a small thing."""

AnswerT = TypeVar("AnswerT", PodAnswer, Orders)


class FollowerRelay(Relay):
    """The relay of a pod that does not lead: its peers are those that the leader names."""

    def __init__(
        self,
        context: Context,
        ring: KeyRing,
        *,
        client: SidecarClient,
        ranks: Ranks,
        leader: RankAddress,
    ) -> None:
        super().__init__(context, ring, client=client, ranks=ranks)
        self._leader = leader
        self.ended: deque[InstanceDied] = deque(maxlen=ENDED_MAX)
        """Incarnations that ended here, until the leader knows."""
        self._questions: dict[RankAddress, set[Asker]] = {}
        self._asked_at: dict[RankAddress, float] = {}
        self._answers: dict[RankAddress, tuple[Resolved, float]] = {}

    # --- our ranks ------------------------------------------------------------------------------

    def asked(self, asker: Asker, address: RankAddress) -> None:
        """A rank asks who is at this bootstrap address: the leader knows."""
        answer, until = self._answers.get(address, (None, 0.0))
        if answer is not None and self._loop.time() < until:
            asker.send(answer)
        elif address in self._questions or len(self._questions) < QUESTIONS_MAX:
            self._questions.setdefault(address, set()).add(asker)
            self._wake()

    def due_questions(self) -> tuple[RankAddress, ...]:
        """What is to be asked now: a question is repeated when its answer must have been lost."""
        now = self._loop.time()
        return tuple(
            address
            for address in self._questions
            if now >= self._asked_at.get(address, now - ASK_AGAIN_SECONDS) + ASK_AGAIN_SECONDS
        )

    def reporting(self, report: PodReport) -> None:
        """This report leaves: its questions are asked. Their answers may come before its own."""
        self._asked_at |= dict.fromkeys(report.questions, self._loop.time())

    def reported(self, report: PodReport) -> None:
        """The leader has this report."""
        for death in report.ended:
            if death in self.ended:
                self.ended.remove(death)

    def unheard(self, report: PodReport) -> None:
        """The leader may not have it: the questions are asked again in the next one."""
        for address in report.questions:
            self._asked_at.pop(address, None)

    def drains(self) -> None:
        """A rank here drains: the leader tells everybody."""
        self._wake()

    def died(self, death: InstanceDied) -> None:
        """The instance ended here: the leader tells everybody."""
        self.ended.append(death)
        self._answers.clear()
        self._wake()

    # --- peers ----------------------------------------------------------------------------------

    def answer_hello(self, theirs: InstanceCard) -> InstanceCard:
        """A sidecar or a router came to the wrong pod.

        Raises:
            NotReady: always, naming the leader.
        """
        raise NotReady(
            f"this is pod {self._config.node} of {self._config.instance}; its leader is at"
            f" {self._leader}, say hello there, {theirs.instance}"
        )

    def greet_again(self, peer: Peer) -> None:
        """The leader notices by itself who fell silent."""

    def obey(self, order: Order) -> DumpRequested | InstanceDied | None:
        """Do what the leader orders; what is not about peers is given back."""
        match order:
            case PeersKnown():
                self._know(order.cards)
            case PeerChanged():
                self._peer_changed(order)
            case Resolved():
                self._resolved(order)
            case CancelLeg():
                self._ranks.to_own(order)
            case DumpRequested() | InstanceDied():
                return order
            case _:
                assert_never(order)
        return None

    def _know(self, cards: tuple[InstanceCard, ...]) -> None:
        self._answers.clear()
        for card in cards:
            try:
                _, died = self.peers.meet(card, self._loop.time())
            except PDClusterError as error:
                self._log.warning("peer not taken", peer=card.instance, detail=error.detail)
                continue
            if died is not None:
                # The order that said so was lost when too many waited.
                self._ranks.to_own(died)
        self._metrics.set_peers(self.peers.counts())

    def _peer_changed(self, changed: PeerChanged) -> None:
        self._answers.clear()
        peer = self.peers.of_incarnation(changed.incarnation)
        if peer is not None and changed.state is PeerState.DEAD:
            peer.node.declared_dead(changed.detail, self._loop.time())
        self._ranks.to_own(changed)

    def _resolved(self, answer: Resolved) -> None:
        address = RankAddress(answer.host, answer.port)
        if answer.card is not None:
            self._answers[address] = (answer, self._loop.time() + KNOWN_SECONDS)
        self._asked_at.pop(address, None)
        for asker in self._questions.pop(address, ()):
            asker.send(answer)

    def _wake(self) -> None:
        if self._ranks.upstream is not None:
            self._ranks.upstream.wake()


class Follower:
    """The two calls to the leader; implements `Upstream`."""

    def __init__(
        self,
        context: Context,
        leader: RankAddress,
        *,
        client: SidecarClient,
        ranks: Ranks,
        relay: FollowerRelay,
    ) -> None:
        self._relay = relay
        self._leader = leader
        self._client = client
        self._ranks = ranks
        self._config = context.config
        self._limits = context.limits
        self._log = context.log
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._dumps: deque[Dump] = deque(maxlen=ENDED_MAX)
        self._describing: set[asyncio.Task[None]] = set()
        self._missing: tuple[RankCoordinate, ...] = ()
        """Ranks that a restarted leader is to be told of again."""
        self._answered_at = self._loop.time()
        self._trouble = ""

    async def run(self) -> None:
        """Report and obey for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report_always())
            group.create_task(self._obey_always())

    def wake(self) -> None:
        """There is something to tell."""
        self._woken.set()

    def unready(self) -> str:
        """Why the leader cannot be relied on now; "" when it can."""
        silent_seconds = self._loop.time() - self._answered_at
        if silent_seconds < self._limits.unknown_after_seconds:
            return ""
        return f"the leader at {self._leader} has been silent for {silent_seconds:.1f} s"

    # --- reports --------------------------------------------------------------------------------

    async def _report_always(self) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            report = self._report()
            self._relay.reporting(report)
            try:
                answer = await self._call(REPORT_PATH, report, PodAnswer)
            except PDClusterError as error:
                self._relay.unheard(report)
                self._failed(error)
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                self._answered(report, answer)
            for gone in self._relay.peers.expire(self._loop.time()):
                self._relay.disconnect(gone)

    def _report(self) -> PodReport:
        ranks = self._ranks
        waiting = [w.hello for w in ranks.waiting.values() if w.link.open]
        members = ranks.instance.members
        again = [
            msgspec.structs.replace(members[place].hello, incarnation=ranks.instance.incarnation)
            for place in self._missing
            if place in members
        ]
        return PodReport(
            cluster=self._config.cluster,
            instance=self._config.instance,
            pod=ranks.plan.pod,
            incarnation=ranks.instance.incarnation,
            hellos=tuple(
                msgspec.structs.replace(hello, tokenizer_files={}) for hello in (*waiting, *again)
            ),
            pulses=ranks.instance.pulses(),
            ended=tuple(self._relay.ended),
            questions=self._relay.due_questions(),
            dumps=tuple(self._dumps),
        )

    def _answered(self, report: PodReport, answer: PodAnswer) -> None:
        ranks = self._ranks
        self._answered_at = self._loop.time()
        self._noticed("")
        self._relay.reported(report)
        for dump in report.dumps:
            # A newer one may have pushed it out meanwhile.
            if dump in self._dumps:
                self._dumps.remove(dump)
        if answer.over and ranks.instance.incarnation == report.incarnation:
            ranks.end(f"incarnation {report.incarnation} is over at the leader")
        else:
            ranks.leader_drains(answer.drain)
        self._missing = answer.missing
        sessions = {hello.coordinate: hello.session for hello in report.hellos}
        for place, word in answer.answers:
            if place in ranks.waiting:
                ranks.answered(place, word, session=sessions.get(place, ""))
            elif word.refused and place in ranks.instance.members:
                ranks.end(f"the leader refuses a rank: {word.refused}")

    def _failed(self, error: PDClusterError) -> None:
        self._noticed(error.detail)
        silent_seconds = self._loop.time() - self._answered_at
        if silent_seconds >= self._limits.dead_after_seconds:
            self._ranks.end(f"the leader at {self._leader} is silent for {silent_seconds:.0f} s")

    def _noticed(self, trouble: str) -> None:
        if bool(trouble) != bool(self._trouble):
            self._log.warning("leader", address=str(self._leader), detail=trouble or "heard")
        self._trouble = trouble

    # --- orders ---------------------------------------------------------------------------------

    async def _obey_always(self) -> None:
        leader, after = "", 0
        while True:
            asked = OrdersAsked(
                instance=self._config.instance,
                pod=self._ranks.plan.pod,
                leader=leader,
                after=after,
            )
            try:
                answer = await self._call(ORDERS_PATH, asked, Orders)
            except PDClusterError:
                # The reports tell of it.
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if answer.session != leader:
                leader, after = answer.session, 0
            for number, order in enumerate(answer.orders, answer.first):
                if number > after:
                    self._obey(order)
                    after = number

    def _obey(self, order: Order) -> None:
        rest = self._relay.obey(order)
        if isinstance(rest, DumpRequested) and len(self._describing) < ENDED_MAX:
            task = self._loop.create_task(self._describe(rest.request))
            self._describing.add(task)
            task.add_done_callback(self._describing.discard)
        elif (
            isinstance(rest, InstanceDied) and rest.incarnation == self._ranks.instance.incarnation
        ):
            self._ranks.end(rest.detail)

    async def _describe(self, request: int) -> None:
        described = await self._ranks.dump()
        small = [(place, raw) for place, raw in described.items() if len(raw) <= DUMP_BYTES_MAX]
        self._dumps.append(Dump(request, tuple(small)))
        self.wake()

    async def _call(self, path: str, said: msgspec.Struct, kind: type[AnswerT]) -> AnswerT:
        body = msgspec.msgpack.encode(said)
        session, raw = await self._client.tell_leader(self._leader, path, body)
        answer = decode_pod_body(raw, kind)
        if answer.session != session:
            raise WireError(f"the leader at {self._leader} signs as another session than it names")
        return answer
