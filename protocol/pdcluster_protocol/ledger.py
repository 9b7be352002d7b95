"""What all machines of one node share: pages, slots, clocks, stories, tombstones, and the outbox.

One node, one ledger, one owner thread. Machines never keep a resource of their own: they ask the
ledger, so that `invariants.check` can count everything in one place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum
from math import inf
from typing import Final, Protocol, TypeVar

import msgspec

from pdcluster_protocol.admission import AdmissionQueue
from pdcluster_protocol.contacts import Contacts
from pdcluster_protocol.deadlines import Deadlines
from pdcluster_protocol.effects import Count, Effect, Fence, Send
from pdcluster_protocol.errors import IllegalTransition, Reason
from pdcluster_protocol.ids import Key, attempt_milliseconds
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.messages import NodeMessage
from pdcluster_protocol.pages import PagePool
from pdcluster_protocol.rank_layout import kv_facts
from pdcluster_protocol.rank_mapping import KVFacts, RowSpread
from pdcluster_protocol.ranks import Lane, OwnRank, RankPlace
from pdcluster_protocol.story import Stories, Transition
from pdcluster_protocol.table import Table
from pdcluster_protocol.topology import Parallelism

TAKES_NOTHING_NEW: Final = "this engine takes nothing new"


class Clock(StrEnum):
    """The separate clocks of a room; the error names the one that ran out."""

    BOOTSTRAP = "bootstrap"
    STALL = "stall"
    TOTAL = "total"
    REPEAT = "repeat"
    ACCEPT = "accept"
    ABORT = "abort"
    REWRITE = "rewrite"
    FAREWELL = "farewell"
    EARLY = "early"


ROOM_CLOCKS: Final = tuple(clock for clock in Clock if clock not in (Clock.FAREWELL, Clock.EARLY))
"""Clocks that end with their room; the others run for keys that have none."""


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is made of; nothing here changes while it lives."""

    layout: KVLayout
    """The whole model's; what each rank holds of it is in `ranks`."""
    page_count: int
    slot_count: int
    parallel: Parallelism
    ranks: tuple[RankPlace, ...]
    """All ranks of this data-parallel rank, by unique rank."""
    spread: RowSpread = RowSpread.FIRST_CP_RANK
    """Which of prefill's context ranks send."""
    timeouts: Timeouts
    limits: Limits
    verify: bool = True
    scatter_seed: int | None = None

    @property
    def facts(self) -> KVFacts:
        """What the mapping of ranks must know of our rows."""
        return kv_facts(self.layout, spread=self.spread)


class Tombstone(msgspec.Struct, frozen=True):
    """How a concluded key ended, for those who ask late."""

    status: int
    reason: str
    drained: bool
    expires_at: float


StateT = TypeVar("StateT", bound=StrEnum)
TriggerT = TypeVar("TriggerT", bound=StrEnum)


class RoomLike(Protocol[StateT]):
    """What `Ledger.advance` needs of a room."""

    key: Key
    state: StateT


class Ledger:
    """Shared state of one node."""

    def __init__(self, setup: NodeSetup) -> None:
        limits = setup.limits
        self.setup = setup
        self.pool = PagePool(setup.page_count, scatter_seed=setup.scatter_seed)
        self.slots = PagePool(setup.slot_count)
        self.queue = AdmissionQueue(self.pool, self.slots)
        self.stories = Stories(keys_max=limits.stories_max, length_max=limits.story_length_max)
        self.deadlines: Deadlines[tuple[Clock, Key]] = Deadlines()
        self.now = 0.0
        self.incarnation = ""
        self.ranks = tuple(OwnRank(index, place) for index, place in enumerate(setup.ranks))
        self.contacts = Contacts(len(self.ranks))
        self.draining: Reason | None = None
        self.fencing = False
        """A fence was asked for and not every rank has its new session yet."""
        self._unfenced: set[int] = set()
        """Ranks whose mapping has not been destroyed since that fence was asked for."""
        self._remapped_at = inf
        """When the first rank had a new session under that fence: of what was locked later it
        proves nothing."""
        self._effects: list[Effect] = []
        self._operations = 0
        self._newest_milliseconds = 0
        self._tombstones: OrderedDict[Key, Tombstone] = OrderedDict()
        self._doubt_until = 0.0

    @property
    def ready(self) -> bool:
        """Whether every rank has a transport session."""
        return all(rank.session is not None for rank in self.ranks)

    # --- transport ---

    def fence(self, cause: str, pages: int) -> None:
        """Ask for the end of every mapping through which writes could land; one at a time."""
        self.fencing, self._remapped_at = True, inf
        self._unfenced = set(range(len(self.ranks)))
        self.emit(Fence(cause=cause, pages=pages))

    def transport_lost(self, rank: int) -> bool:
        """A rank's mapping is gone; whether all that existed at the fence are.

        Without a fence a node of one rank has none left, and of another one nothing is proven.
        """
        self.ranks[rank].session = None
        self.contacts.forget_rank(rank)
        self._unfenced.discard(rank)
        return not self._unfenced if self.fencing else len(self.ranks) == 1

    def transport_ready(self, rank: int, session: str, base_address: int) -> None:
        """A rank's memory is mapped anew."""
        own = self.ranks[rank]
        own.session, own.base_address = session, base_address
        own.mapping += 1
        self.fencing = self.fencing and not (self.ready and not self._unfenced)
        self._remapped_at = min(self._remapped_at, self.now) if self.fencing else inf

    def absolve_fenced(self) -> list[Key]:
        """Every mapping that existed is gone: free what was locked while they did."""
        self.slots.absolve_fenced(locked_before=self._remapped_at)
        return self.pool.absolve_fenced(locked_before=self._remapped_at)

    # --- outbox ---

    def emit(self, effect: Effect) -> None:
        """Add an effect to the answer of this `handle`."""
        self._effects.append(effect)

    def send(self, lane: Lane, message: NodeMessage) -> None:
        """Add a message from one of our ranks to one of a peer's."""
        self._effects.append(Send(lane.peer, message, lane.rank))

    def count(self, what: str) -> None:
        """Note a message that is normal but useless."""
        self._effects.append(Count(what))

    def take_effects(self) -> list[Effect]:
        """The effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def next_operation(self) -> int:
        """A fresh number for a write or a verification."""
        self._operations += 1
        return self._operations

    # --- stories and clocks ---

    def advance(
        self,
        table: Table[StateT, TriggerT],
        room: RoomLike[StateT],
        trigger: TriggerT,
        detail: str = "",
    ) -> None:
        """Move a room along its table and write the step into its story.

        Raises:
            IllegalTransition: with the key and its story: a bug of ours.
        """
        before = room.state
        try:
            room.state = table.advance(before, trigger)
        except IllegalTransition as illegal:
            story = "; ".join(map(str, self.stories.of(room.key))) or "none"
            detail = f"{illegal.detail}; story: {story}"
            raise IllegalTransition(detail, key=room.key) from illegal
        self.stories.add(
            room.key,
            Transition(self.now, table.name, before, trigger, room.state, detail),
        )

    def set_clock(self, clock: Clock, key: Key, seconds: float) -> None:
        """Start or move a clock of a key."""
        self.deadlines.set((clock, key), self.now + seconds)

    def stop_clocks(self, key: Key, clocks: Iterable[Clock] = ROOM_CLOCKS) -> None:
        """Stop clocks of a key."""
        for clock in clocks:
            self.deadlines.clear((clock, key))

    # --- identity over time ---

    def saw_attempt(self, key: Key) -> None:
        """Move the watermark: the newest attempt seen."""
        self._newest_milliseconds = max(
            self._newest_milliseconds, attempt_milliseconds(key.attempt)
        )

    def is_stale(self, key: Key) -> bool:
        """Whether a key is older than anything that can still be alive."""
        if key.attempt == 0:
            return False
        timeouts, limits = self.setup.timeouts, self.setup.limits
        span = timeouts.bootstrap_seconds + timeouts.transfer_seconds + limits.clock_skew_seconds
        return attempt_milliseconds(key.attempt) < self._newest_milliseconds - span * 1000

    def bury(self, key: Key, status: int, *, reason: str = "", drained: bool = True) -> None:
        """Remember how a key ended; oldest out first."""
        timeouts = self.setup.timeouts
        life = timeouts.bootstrap_seconds + timeouts.transfer_seconds
        self._tombstones[key] = Tombstone(status, reason, drained, self.now + life)
        self._tombstones.move_to_end(key)
        while self._tombstones:
            oldest = next(iter(self._tombstones.values()))
            if (
                len(self._tombstones) <= self.setup.limits.tombstones_max
                and oldest.expires_at > self.now
            ):
                break
            _, forgotten = self._tombstones.popitem(last=False)
            if not forgotten.drained:
                self._doubt_until = max(self._doubt_until, forgotten.expires_at)

    def tombstone(self, key: Key) -> Tombstone | None:
        """How a key ended, if it is still remembered."""
        return self._tombstones.get(key)

    def drained(self, key: Key) -> bool:
        """Whether every write of a concluded or unknown key has provably stopped.

        While a tombstone that said otherwise was pushed out before its time, unknown keys are in
        doubt too.
        """
        buried = self._tombstones.get(key)
        return self.now >= self._doubt_until if buried is None else buried.drained

    @property
    def tombstone_count(self) -> int:
        """Bounded by `limits.tombstones_max`."""
        return len(self._tombstones)
