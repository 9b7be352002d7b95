"""One instance as its own sidecars know it: who joined, which incarnation, who may pair with it.

The ranks join over their links. The first to join decides the incarnation: the one it carries (the
sidecar was restarted under living ranks), or a fresh one. The death of any rank ends the instance,
since one rank's pages are a part of everybody's: all ranks are forgotten, the incarnation never
comes back, and whoever joins next begins a new one.

An instance of several *pods* has its DP ranks spread over them in order. Its first pod (node 0)
leads: its `InstanceNode` holds the ranks of all pods and is what the world sees. Each other pod has
an `InstanceNode` of its own ranks, which join there only with the leader's word.

One rank that drains drains the instance: a request may need any of them. Nobody may leave while
another rank has a room, since that would be the instance's death; `drained` says when none has.

A death is not always seen: a sidecar may be away when it happens. So a rank that greets *afresh*,
without an incarnation, tells of the death of the one that was in its place; and while the present
incarnation was only adopted from living ranks by a restarted sidecar, any fresh rank does. A hello
of the very process that is in that place tells nothing: the answer to its first one was lost.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from pdcluster_protocol.control_api import LoadReport, PodCard
from pdcluster_protocol.errors import ConfigError, LayoutMismatch, Reason
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import (
    WIRE_VERSION_MAX,
    WIRE_VERSION_MIN,
    EngineHello,
    HelloAnswer,
    InstanceCard,
    Load,
    Pulse,
    RankCard,
)
from pdcluster_protocol.rank_layout import kv_facts
from pdcluster_protocol.rank_mapping import RankMapping, RowSpread
from pdcluster_protocol.topology import Parallelism, RankCoordinate

DEAD_INCARNATIONS_MAX: Final = 256


class InstancePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says that this instance is."""

    cluster: str
    instance: str
    role: Role
    parallel: Parallelism
    allocation: str
    fingerprint: str
    """Empty: the first rank's is taken."""
    http: RankAddress
    """The sidecar's own HTTP address; the control ports are on the same host."""
    control_port: int
    session: str
    """Of the sidecar process."""
    nodes: int = 1
    """Pods; the DP ranks are spread over them evenly and in order."""
    node: int = 0
    """Which of them this one is; 0 leads."""

    @property
    def pod(self) -> PodCard:
        """This pod."""
        return PodCard(self.node, self.http, self.session)

    @property
    def rank_count(self) -> int:
        """How many ranks this pod waits for: the leader for all, another for its own."""
        count = self.parallel.rank_count
        return count if self.node == 0 else count // self.nodes

    def node_of(self, coordinate: RankCoordinate) -> int:
        """The pod of a rank."""
        return coordinate.dp * self.nodes // self.parallel.dp

    def address(self, coordinate: RankCoordinate, pod: PodCard | None = None) -> RankAddress:
        """Where this rank's control messages are received."""
        host = (pod or self.pod).http.host
        return RankAddress(host, self.control_port + coordinate.control_index(self.parallel))


class Member(msgspec.Struct):
    """One rank that joined."""

    hello: EngineHello
    """Without its tokenizer files, which are kept once."""
    pulse: Pulse
    """Its last word."""
    moved_at: float
    """When its loop counter last moved."""
    pod: PodCard


class InstanceNode:
    """The ranks of one instance."""

    __slots__ = (
        "_adopted",
        "_dead",
        "_heard_at",
        "_limits",
        "_plan",
        "incarnation",
        "members",
        "tokenizer",
    )

    def __init__(self, plan: InstancePlan, limits: Limits) -> None:
        self._plan = plan
        self._limits = limits
        self._dead: deque[str] = deque(maxlen=DEAD_INCARNATIONS_MAX)
        self._adopted = False
        """The present incarnation was brought by a living rank, not begun here."""
        self._heard_at: dict[int, float] = {}
        """When each other pod last reported, by node."""
        self.incarnation = ""
        self.members: dict[RankCoordinate, Member] = {}
        self.tokenizer: tuple[str, dict[str, bytes]] = ("", {})
        """Digest and files, from the rank that joined last."""

    def proves_death(self, hello: EngineHello) -> str:
        """How this hello shows that the present incarnation has ended unseen; "" if it does not."""
        if hello.incarnation or not self.incarnation or self._misfit(hello, None):
            return ""
        place, known = _place(hello.coordinate), self.members.get(hello.coordinate)
        if known is not None:
            same = known.hello.session == hello.session
            return "" if same else f"rank {place} has started anew"
        if self._adopted:
            return f"rank {place} has started anew while this sidecar was away"
        return ""

    def join(
        self, hello: EngineHello, *, minted: str, now: float, pod: PodCard | None = None
    ) -> HelloAnswer:
        """A rank says hello; `minted` is a fresh incarnation in case one is needed.

        `pod` is another pod that the rank is in. A hello that `proves_death` is to be asked about
        first.
        """
        pod = pod or self._plan.pod
        refused = self.refusal(hello, node=pod.node)
        if refused:
            # A coordinate that is refused may be any number, and has no address.
            return HelloAnswer("", self._plan.address(RankCoordinate(), pod), refused)
        address = self._plan.address(hello.coordinate, pod)
        if not self.incarnation:
            self._adopted = bool(hello.incarnation)
            self.incarnation = hello.incarnation or minted
        if hello.tokenizer_files:
            self.tokenizer = (hello.tokenizer_digest, dict(hello.tokenizer_files))
        slim = msgspec.structs.replace(hello, tokenizer_files={})
        self.members[hello.coordinate] = Member(slim, Pulse(0, Load()), now, pod)
        if pod.node != self._plan.node:
            self._heard_at[pod.node] = now
        return HelloAnswer(self.incarnation, address)

    def lose(self, coordinate: RankCoordinate) -> str:
        """A rank's link closed; gives the incarnation that ended with it, or "" if none did."""
        return self.end() if coordinate in self.members else ""

    def end(self) -> str:
        """The instance died; gives the incarnation that ended."""
        ended = self.incarnation
        if ended:
            self._dead.append(ended)
        self.members.clear()
        self._heard_at.clear()
        self.incarnation = ""
        self._adopted = False
        return ended

    def is_dead(self, incarnation: str) -> bool:
        """Whether this incarnation ended here."""
        return incarnation in self._dead

    def heard(self, node: int, now: float) -> None:
        """Another pod reported; one without a rank here is not waited for."""
        if node in self._heard_at:
            self._heard_at[node] = now

    def gone(self, now: float) -> str:
        """Which pod has been silent for so long that it counts as dead, in words; "" for none."""
        seconds = self._limits.dead_after_seconds
        for node, heard_at in sorted(self._heard_at.items()):
            if now >= heard_at + seconds:
                return f"pod {node} has been silent for {seconds:g} s"
        return ""

    def pulse(self, coordinate: RankCoordinate, pulse: Pulse, now: float) -> None:
        """A rank's loop counter and load."""
        member = self.members.get(coordinate)
        if member is None:
            return
        if pulse.loops != member.pulse.loops:
            member.moved_at = now
        member.pulse = pulse

    def pulses(self) -> tuple[tuple[RankCoordinate, Pulse], ...]:
        """The last word of each rank, to be passed on."""
        return tuple((place, member.pulse) for place, member in sorted(self.members.items()))

    @property
    def draining(self) -> bool:
        """Whether a rank takes nothing new."""
        return any(member.pulse.draining for member in self.members.values())

    @property
    def drained(self) -> bool:
        """Whether every rank takes nothing new, and has no room left."""
        pulses = [member.pulse for member in self.members.values()]
        return len(pulses) == self._plan.rank_count and all(
            pulse.draining and pulse.load.rooms_open == 0 for pulse in pulses
        )

    def unready(self, now: float) -> str:
        """Why this instance cannot serve a new request now; "" when it can."""
        return self.trouble(now) or ("this instance is draining" if self.draining else "")

    def trouble(self, now: float) -> str:
        """Why this instance cannot be relied on, also for what it has begun; "" when it can."""
        expected = self._plan.rank_count
        if len(self.members) < expected:
            return f"{len(self.members)} of {expected} ranks are linked"
        for node, heard_at in sorted(self._heard_at.items()):
            if now >= heard_at + self._limits.unknown_after_seconds:
                return f"pod {node} has been silent for {now - heard_at:.1f} s"
        for coordinate, member in sorted(self.members.items()):
            if now >= member.moved_at + self._limits.unknown_after_seconds:
                age = now - member.moved_at
                return f"the loop of rank {_place(coordinate)} has not moved for {age:.1f} s"
        return ""

    def loops(self) -> tuple[int, ...]:
        """The loop counter of each rank, in the order of their coordinates."""
        return tuple(member.pulse.loops for _, member in sorted(self.members.items()))

    def load_report(self, now: float) -> LoadReport:
        """One load per DP rank: that of its first rank, which admits for the others."""
        first: dict[int, Load] = {}
        for coordinate, member in sorted(self.members.items()):
            first.setdefault(coordinate.dp, member.pulse.load)
        return LoadReport(
            self.incarnation, not self.trouble(now), self.draining, tuple(first.values())
        )

    def card(self, now: float) -> InstanceCard:
        """Who we are, for a hello."""
        plan = self._plan
        members = sorted(self.members.items())
        first = members[0][1].hello if members else None
        return InstanceCard(
            cluster=plan.cluster,
            instance=plan.instance,
            role=plan.role,
            incarnation=self.incarnation,
            session=plan.session,
            http=plan.http,
            ranks=tuple(
                RankCard(
                    coordinate,
                    plan.address(coordinate, member.pod),
                    member.hello.http_port,
                    # Of its own pod's sidecar, where that is not the one who speaks.
                    session="" if member.pod.session == plan.session else member.pod.session,
                )
                for coordinate, member in members
            ),
            parallel=plan.parallel,
            layout=first.layout if first else None,
            spread=first.spread if first else RowSpread.FIRST_CP_RANK,
            allocation=plan.allocation,
            fingerprint=plan.fingerprint or (first.fingerprint if first else ""),
            served_name=first.served_name if first else "",
            max_context=first.max_context if first else 0,
            ready=not self.trouble(now),
            draining=self.draining,
        )

    def refusal(self, hello: EngineHello, *, node: int | None = None) -> str:
        """Why such a rank is none of this instance, or none of that pod; "" if it is."""
        return self._misfit(hello, node) or self._stale(hello)

    def _misfit(self, hello: EngineHello, node: int | None) -> str:
        plan = self._plan
        first = next(iter(self.members.values()), None)
        fingerprint = plan.fingerprint or (first.hello.fingerprint if first else hello.fingerprint)
        for name, ours, theirs in (
            ("instance", plan.instance, hello.instance),
            ("role", str(plan.role), hello.role),
            ("parallel", plan.parallel, hello.parallel),
            ("allocation", plan.allocation, hello.allocation),
            ("fingerprint", fingerprint, hello.fingerprint),
        ):
            if ours != theirs:
                return f"{name} is {theirs!r}; this sidecar serves {ours!r}"
        place, sizes = hello.coordinate, plan.parallel
        ranges = {"dp": sizes.dp, "cp": sizes.cp, "tp": sizes.attention_tp, "pp": sizes.pp}
        for name, size in ranges.items():
            if not 0 <= getattr(place, name) < size:
                return f"coordinate.{name} is {getattr(place, name)}; it must be in [0, {size - 1}]"
        if node is not None and plan.node_of(place) != node:
            return f"coordinate.dp is {place.dp}; that rank belongs to pod {plan.node_of(place)}"
        if first is not None:
            try:
                first.hello.layout.require_compatible(hello.layout)
            except LayoutMismatch as error:
                return f"layout differs from the other ranks': {error.detail}"
        return ""

    def _stale(self, hello: EngineHello) -> str:
        """Only a fresh process may take part in what follows an incarnation's end."""
        said = hello.incarnation
        if said and (said in self._dead or self.incarnation not in ("", said)):
            return f"incarnation {said} has ended; start anew"
        return ""


def _place(coordinate: RankCoordinate) -> tuple[int, ...]:
    """As it is written in messages."""
    return tuple(msgspec.to_builtins(coordinate))


def pairing_refusal(ours: InstanceCard, theirs: InstanceCard) -> tuple[Reason, str] | None:
    """Why these two must not exchange KV, with both values; None when they may."""
    overlap = theirs.wire_min <= WIRE_VERSION_MAX and theirs.wire_max >= WIRE_VERSION_MIN
    if not overlap:
        return Reason.WIRE_ERROR, (
            f"wire versions: ours are {WIRE_VERSION_MIN} to {WIRE_VERSION_MAX}, those of"
            f" {theirs.instance} are {theirs.wire_min} to {theirs.wire_max}"
        )
    for reason, name in (
        (Reason.FINGERPRINT_MISMATCH, "cluster"),
        (Reason.FINGERPRINT_MISMATCH, "fingerprint"),
        (Reason.POLICY_MISMATCH, "allocation"),
    ):
        mine, peer = getattr(ours, name), getattr(theirs, name)
        if mine != peer:
            return reason, f"{name}: ours is {mine!r}, that of {theirs.instance} is {peer!r}"
    if ours.layout is not None and theirs.layout is not None:
        try:
            ours.layout.require_compatible(theirs.layout)
            _require_ranks_meet(ours, theirs, ours.layout)
        except (LayoutMismatch, ConfigError) as error:
            return Reason.LAYOUT_MISMATCH, f"{theirs.instance}: {error.detail}"
    return None


def _require_ranks_meet(ours: InstanceCard, theirs: InstanceCard, layout: KVLayout) -> None:
    """Find sizes that exclude each other now, not in the first request.

    Raises:
        LayoutMismatch: naming the sizes.
        ConfigError: no rule divides these rows.
    """
    cards = {card.role: card for card in (ours, theirs)}
    prefill, decode = cards.get(Role.PREFILL), cards.get(Role.DECODE)
    if prefill is not None and decode is not None:
        facts = kv_facts(layout, spread=prefill.spread)
        RankMapping(prefill.parallel, decode.parallel, facts)
