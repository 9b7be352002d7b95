"""One instance as its own sidecar knows it: who joined, which incarnation, who may pair with it.

The ranks join over their links. The first to join decides the incarnation: the one it carries (the
sidecar was restarted under living ranks), or a fresh one. The death of any rank ends the instance,
since one rank's pages are a part of everybody's: all ranks are forgotten, the incarnation never
comes back, and whoever joins next begins a new one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from pdcluster_protocol.control_api import LoadReport
from pdcluster_protocol.errors import LayoutMismatch, Reason
from pdcluster_protocol.ids import RankAddress, Role
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
from pdcluster_protocol.rank_mapping import RowSpread
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

    def address(self, coordinate: RankCoordinate) -> RankAddress:
        """Where this rank's control messages are received."""
        return RankAddress(
            self.http.host, self.control_port + coordinate.control_index(self.parallel)
        )


class Member(msgspec.Struct):
    """One rank that joined."""

    hello: EngineHello
    """Without its tokenizer files, which are kept once."""
    load: Load
    loops: int
    moved_at: float
    """When its loop counter last moved."""


class InstanceNode:
    """The ranks of one instance."""

    __slots__ = ("_dead", "_limits", "_plan", "draining", "incarnation", "members", "tokenizer")

    def __init__(self, plan: InstancePlan, limits: Limits) -> None:
        self._plan = plan
        self._limits = limits
        self._dead: deque[str] = deque(maxlen=DEAD_INCARNATIONS_MAX)
        self.incarnation = ""
        self.draining = False
        self.members: dict[RankCoordinate, Member] = {}
        self.tokenizer: tuple[str, dict[str, bytes]] = ("", {})
        """Digest and files, from the rank that joined last."""

    def join(self, hello: EngineHello, *, minted: str, now: float) -> HelloAnswer:
        """A rank says hello; `minted` is a fresh incarnation in case one is needed."""
        refused = self._refusal(hello)
        address = self._plan.address(hello.coordinate)
        if refused:
            return HelloAnswer("", address, refused)
        if not self.incarnation:
            known = hello.incarnation and hello.incarnation not in self._dead
            self.incarnation = hello.incarnation if known else minted
        if hello.tokenizer_files:
            self.tokenizer = (hello.tokenizer_digest, dict(hello.tokenizer_files))
        slim = msgspec.structs.replace(hello, tokenizer_files={})
        self.members[hello.coordinate] = Member(slim, Load(), 0, now)
        return HelloAnswer(self.incarnation, address)

    def lose(self, coordinate: RankCoordinate) -> str:
        """A rank's link closed; gives the incarnation that ended with it, or "" if none did."""
        if coordinate not in self.members:
            return ""
        ended = self.incarnation
        self._dead.append(ended)
        self.members.clear()
        self.incarnation = ""
        return ended

    def pulse(self, coordinate: RankCoordinate, pulse: Pulse, now: float) -> None:
        """A rank's loop counter and load."""
        member = self.members.get(coordinate)
        if member is None:
            return
        if pulse.loops != member.loops:
            member.loops, member.moved_at = pulse.loops, now
        member.load = pulse.load

    def unready(self, now: float) -> str:
        """Why this instance cannot serve a request now; "" when it can."""
        expected = self._plan.parallel.rank_count
        if len(self.members) < expected:
            return f"{len(self.members)} of {expected} ranks are linked"
        for coordinate, member in sorted(self.members.items()):
            if now >= member.moved_at + self._limits.unknown_after_seconds:
                age = now - member.moved_at
                place = tuple(msgspec.to_builtins(coordinate))
                return f"the loop of rank {place} has not moved for {age:.1f} s"
        return "this instance is draining" if self.draining else ""

    def loops(self) -> tuple[int, ...]:
        """The loop counter of each rank, in the order of their coordinates."""
        return tuple(member.loops for _, member in sorted(self.members.items()))

    def load_report(self, now: float) -> LoadReport:
        """One load per DP rank: that of its first rank, which admits for the others."""
        first: dict[int, Load] = {}
        for coordinate, member in sorted(self.members.items()):
            first.setdefault(coordinate.dp, member.load)
        return LoadReport(
            self.incarnation, not self.unready(now), self.draining, tuple(first.values())
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
                RankCard(coordinate, plan.address(coordinate), member.hello.http_port)
                for coordinate, member in members
            ),
            parallel=plan.parallel,
            layout=first.layout if first else None,
            spread=first.spread if first else RowSpread.FIRST_CP_RANK,
            allocation=plan.allocation,
            fingerprint=plan.fingerprint or (first.fingerprint if first else ""),
            served_name=first.served_name if first else "",
            max_context=first.max_context if first else 0,
            ready=not self.unready(now),
            draining=self.draining,
        )

    def _refusal(self, hello: EngineHello) -> str:
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
        if first is not None:
            try:
                first.hello.layout.require_compatible(hello.layout)
            except LayoutMismatch as error:
                return f"layout differs from the other ranks': {error.detail}"
        return ""


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
        except LayoutMismatch as error:
            return Reason.LAYOUT_MISMATCH, f"{theirs.instance}: {error.detail}"
    return None
