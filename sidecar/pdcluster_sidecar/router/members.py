"""What is known of the replicas: one watch per member, and what follows from it.

A member is used after its signed hello, while its load reports come and say that it is ready. While
it is used the call for a report is held there for a second, and answered at once when something
changes. A report of another incarnation, or of none, means that the engine which we knew is dead:
everybody who uses it is told at once. One that drains gets nothing new, and what runs there goes
on. Silence, or saying that it is not ready, is less: after `unknown_after_seconds` nothing new goes
there, after `dead_after_seconds` its sequences must show progress of their own.

A leg that was refused or lost marks its member as blamed: it gets nothing new until the next
successful report, so that a retry does not run into the same wall. A client's error blames nobody.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from pdcluster_protocol.config import Member, RouterConfig
from pdcluster_protocol.control_api import LoadReport
from pdcluster_protocol.errors import PDClusterError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import WIRE_VERSION_MAX, WIRE_VERSION_MIN, InstanceCard
from pdcluster_sidecar.router.pick import Candidate, Group, Slot, form_groups
from pdcluster_sidecar.router.tokens import Codec, TokenizerAnswer
from pdcluster_sidecar.router.watched import MemberView, Watched

POLL_SECONDS: Final = 1.0
POLL_NOT_READY_SECONDS: Final = 0.25
"""While a member starts, a client may be waiting for it."""
NAMED_MAX: Final = 8
"""Members that an answer to a client names."""
HURRY_SECONDS: Final = 0.05
"""Between blame and the next look."""

log = structlog.get_logger()


class Calls(Protocol):
    """What the watches ask sidecars."""

    async def hello(self, address: RankAddress, ours: InstanceCard) -> InstanceCard: ...

    async def load(self, address: RankAddress) -> LoadReport: ...

    async def held_load(self, address: RankAddress, incarnation: str) -> LoadReport: ...

    async def tokenizer(self, address: RankAddress) -> TokenizerAnswer: ...


class Members:
    """All members; the `on_…` callbacks are told what happens to them."""

    def __init__(
        self, config: RouterConfig, calls: Calls, *, ours: InstanceCard, now: Callable[[], float]
    ) -> None:
        self._config = config
        self._calls = calls
        self._ours = ours
        self._now = now
        self._limits = Limits()
        self._watched = {member.instance: Watched(member) for member in config.members}
        self._codecs: dict[str, Codec] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._candidates: list[Candidate] = []
        self._groups: tuple[Group, ...] = ()
        self._codec: Codec | None = None
        self._known_until = -math.inf
        """Until then, or the next change, the three above hold: every request asks for them."""
        self.codec_known = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self.on_dead: Callable[[str, str], None] = lambda _incarnation, _detail: None
        self.on_silent: Callable[[str], None] = lambda _incarnation: None
        self.on_heard: Callable[[str], None] = lambda _incarnation: None

    def start(self) -> None:
        """Begin to watch."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(each)) for each in self._watched.values()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def candidates(self) -> list[Candidate]:
        """The members that may be chosen now."""
        self._find_out()
        return self._candidates

    def groups(self) -> tuple[Group, ...]:
        """The candidates, as they can be paired."""
        self._find_out()
        return self._groups

    def shortage(self) -> str:
        """Why there is no pair, by the members of each role that has none to offer."""
        self._find_out()
        offered = {candidate.role for candidate in self._candidates}
        named = [
            f"{each.member.instance}: {each.problem or 'it has not reported in time'}"
            for each in self._watched.values()
            if each.member.role not in offered
        ]
        if not named:
            return "the prefill and decode members are of different fingerprints"
        more = [] if len(named) <= NAMED_MAX else [f"and {len(named) - NAMED_MAX} more"]
        return "; ".join([*named[:NAMED_MAX], *more])

    def codec(self) -> Codec | None:
        """The tokenizer of a usable member, else one that is known from before."""
        self._find_out()
        return self._codec

    def blame(self, instance: str) -> None:
        """A leg there was refused or lost: nothing new until it has reported again."""
        if (watched := self._watched.get(instance)) is not None:
            watched.blamed_at = self._now()
            self._changed()
            watched.look_again()

    def hurry(self) -> None:
        """Look at every member again at once."""
        for watched in self._watched.values():
            watched.look_again()

    def sidecar(self, instance: str) -> RankAddress:
        """Where aborts for this member go."""
        return self._watched[instance].address

    def views(self) -> list[MemberView]:
        now = self._now()
        unknown_after = self._limits.unknown_after_seconds
        return [
            MemberView(
                instance=each.member.instance,
                role=each.member.role,
                usable=each.usable(now, unknown_after_seconds=unknown_after),
                incarnation=each.card.incarnation if each.card else "",
                fingerprint=each.card.fingerprint if each.card else "",
                heard_seconds_ago=None if each.heard_at is None else now - each.heard_at,
                problem=each.problem,
                in_flight=tuple(slot.in_flight for slot in each.slots),
                report=each.report,
            )
            for each in self._watched.values()
        ]

    def _find_out(self) -> None:
        """See who is usable, if a member has changed or may have been silent for too long."""
        now = self._now()
        if now <= self._known_until:
            return
        unknown_after = self._limits.unknown_after_seconds
        self._candidates = [
            each.candidate
            for each in self._watched.values()
            if each.candidate is not None and each.usable(now, unknown_after_seconds=unknown_after)
        ]
        self._groups = form_groups(self._candidates)
        codecs = (self._codecs.get(candidate.digest) for candidate in self._candidates)
        known = next(reversed(self._codecs.values()), None)
        self._codec = next((codec for codec in codecs if codec is not None), known)
        heard = [each.heard_at for each in self._watched.values() if each.heard_at is not None]
        silent_at = [at + unknown_after for at in heard if at + unknown_after >= now]
        self._known_until = min(silent_at, default=now)

    def _changed(self) -> None:
        self._known_until = -math.inf

    # --- the watch of one member ----------------------------------------------------------------

    async def _watch(self, watched: Watched) -> None:
        hurried = False
        while True:
            began_at = self._now()
            held = self._is_usable(watched) and not hurried
            await self._visit(watched, held=held)
            usable = self._is_usable(watched)
            if held or not usable:
                # A sidecar that holds no calls is not asked more often than one that does.
                pause_seconds = POLL_SECONDS if usable else POLL_NOT_READY_SECONDS
                await _wait_set(watched.hurry, began_at + pause_seconds - self._now())
            hurried = watched.hurry.is_set()
            if hurried:
                watched.hurry.clear()
                # Its sidecar may learn of a death a moment after us.
                await asyncio.sleep(HURRY_SECONDS)

    def _is_usable(self, watched: Watched) -> bool:
        unknown_after = self._limits.unknown_after_seconds
        return watched.usable(self._now(), unknown_after_seconds=unknown_after)

    async def _visit(self, watched: Watched, *, held: bool) -> None:
        """One look at a member; what goes wrong is its problem, never the watch's."""
        problem = ""
        began_at = self._now()
        try:
            if watched.card is None:
                await self._greet(watched)
            report = await self._ask(watched, held=held)
            if report is None:
                return
            if watched.blamed_at is not None and watched.blamed_at < began_at:
                watched.blamed_at = None
            self._take_report(watched, report)
            problem = "it is draining" if report.draining else ""
        except PDClusterError as error:
            problem = error.detail
            self._note_silence(watched)
        except Exception:
            # A fault of ours must not end the watch, for then nobody would hear of a death.
            log.exception("member not looked at", peer=watched.member.instance)
            problem = "looking at it failed here; the router's log says how"
            self._note_silence(watched)
        if problem != watched.problem:
            watched.problem = problem
            log.info("member_changed", peer=watched.member.instance, detail=problem or "heard")

    async def _ask(self, watched: Watched, *, held: bool) -> LoadReport | None:
        """Its report, where it may be held as soon as there is news; None: ask again at once."""
        if not held or watched.card is None:
            return await self._calls.load(watched.address)
        try:
            async with asyncio.timeout(None) as watched.hold:
                return await self._calls.held_load(watched.address, watched.card.incarnation)
        except TimeoutError:
            return None
        finally:
            watched.hold = None

    async def _greet(self, watched: Watched) -> None:
        card = await self._calls.hello(watched.address, self._ours)
        self._check_card(watched.member, card)
        codec = await self._codec_of(watched.address, card)
        slots = tuple(
            # Each on the host of its own pod: an instance may have several.
            Slot(card.instance, dp_rank, RankAddress(rank.address.host, rank.http_port))
            for dp_rank, rank in sorted({r.coordinate.dp: r for r in card.ranks}.items())
        )
        watched.card = card
        watched.slots = slots
        watched.codec = codec
        watched.candidate = Candidate(
            instance=card.instance,
            role=watched.member.role,
            incarnation=card.incarnation,
            fingerprint=card.fingerprint,
            digest=codec.digest,
            bootstrap=watched.address,
            dp_size=card.parallel.dp,
            slots=slots,
        )
        # Whoever waits for a tokenizer must find this one.
        self._changed()
        self.codec_known.set()

    def _check_card(self, member: Member, card: InstanceCard) -> None:
        expected = (self._config.cluster, member.instance, member.role)
        found = (card.cluster, card.instance, card.role)
        if found != expected:
            raise PDClusterError(f"it is {'/'.join(found)}; expected {'/'.join(expected)}")
        if card.wire_min > WIRE_VERSION_MAX or card.wire_max < WIRE_VERSION_MIN:
            raise PDClusterError(
                f"it speaks wire {card.wire_min} to {card.wire_max};"
                f" we speak {WIRE_VERSION_MIN} to {WIRE_VERSION_MAX}"
            )
        if not card.ready or not card.incarnation:
            raise PDClusterError("it is not ready")
        if len(card.ranks) != card.parallel.rank_count:
            raise PDClusterError(
                f"it names {len(card.ranks)} of its {card.parallel.rank_count} ranks"
            )

    async def _codec_of(self, address: RankAddress, card: InstanceCard) -> Codec:
        """The member's tokenizer; one fingerprint has one tokenizer, so it is fetched once."""
        for each in self._watched.values():
            same = each.card is not None and each.card.fingerprint == card.fingerprint != ""
            if same and each.codec is not None:
                return each.codec
        answer = await self._calls.tokenizer(address)
        if answer.digest not in self._codecs:
            loop = asyncio.get_running_loop()
            self._codecs[answer.digest] = await loop.run_in_executor(None, Codec.of, answer)
        return self._codecs[answer.digest]

    def _take_report(self, watched: Watched, report: LoadReport) -> None:
        card = watched.card
        if card is not None and report.incarnation != card.incarnation:
            watched.forget()
            self._changed()
            self.on_dead(card.incarnation, f"{card.instance} lost its engine")
            raise PDClusterError("its incarnation changed")
        watched.report = report
        self._changed()
        if not report.ready:
            # Its sidecar speaks, but an engine's loop stands still, or a rank is missing.
            raise PDClusterError("it is not ready")
        watched.heard_at = self._now()
        if watched.silence_told and card is not None:
            self.on_heard(card.incarnation)
        watched.silence_told = False
        for slot in watched.slots:
            if slot.dp_rank < len(report.loads):
                slot.load = report.loads[slot.dp_rank]
        self.on_change()

    def _note_silence(self, watched: Watched) -> None:
        silent_seconds = self._now() - watched.heard_at if watched.heard_at is not None else 0.0
        if silent_seconds >= self._limits.dead_after_seconds and not watched.silence_told:
            watched.silence_told = True
            if watched.card is not None:
                self.on_silent(watched.card.incarnation)


async def _wait_set(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
