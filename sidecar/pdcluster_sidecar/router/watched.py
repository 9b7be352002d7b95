"""One configured member of a router: what is known of it, and whether new legs may go there."""

from __future__ import annotations

import asyncio

import msgspec

from pdcluster_protocol.config import Member
from pdcluster_protocol.control_api import LoadReport
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import InstanceCard
from pdcluster_sidecar.router.pick import Candidate, Slot
from pdcluster_sidecar.router.tokens import Codec


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """One member as the admin port shows it."""

    instance: str
    role: str
    usable: bool
    incarnation: str
    fingerprint: str
    heard_seconds_ago: float | None
    problem: str
    in_flight: tuple[int, ...]
    report: LoadReport | None


class Watched:
    """One configured member: its card, its newest report, its slots."""

    __slots__ = (
        "address",
        "blamed_at",
        "candidate",
        "card",
        "codec",
        "heard_at",
        "hold",
        "hurry",
        "member",
        "problem",
        "report",
        "silence_told",
        "slots",
    )

    def __init__(self, member: Member) -> None:
        self.member = member
        self.address = RankAddress(member.host, member.sidecar_port)
        self.card: InstanceCard | None = None
        self.report: LoadReport | None = None
        self.codec: Codec | None = None
        self.candidate: Candidate | None = None
        self.slots: tuple[Slot, ...] = ()
        self.heard_at: float | None = None
        """When it last said that it is ready."""
        self.blamed_at: float | None = None
        self.hurry = asyncio.Event()
        """Look again at once."""
        self.hold: asyncio.Timeout | None = None
        """Around a call that is held."""
        self.silence_told = False
        self.problem = "no hello yet"

    def usable(self, now: float, *, unknown_after_seconds: float) -> bool:
        """Whether new legs may go there."""
        return (
            self.candidate is not None
            and self.report is not None
            and self.report.ready
            and not self.report.draining
            and self.blamed_at is None
            and self.heard_at is not None
            and now - self.heard_at <= unknown_after_seconds
        )

    def look_again(self) -> None:
        """Do not wait for the next look, nor for one that is held."""
        self.hurry.set()
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.reschedule(asyncio.get_running_loop().time())

    def forget(self) -> None:
        """The incarnation that was known is gone."""
        self.card = None
        self.candidate = None
        self.report = None
        self.slots = ()
