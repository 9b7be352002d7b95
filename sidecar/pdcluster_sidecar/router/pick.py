"""The choice of a pair: pure, over what is known of each DP rank at this moment.

Pairs form only inside one group: one fingerprint and one tokenizer. In it, each side is chosen by
the power of two choices: of two ranks drawn at random the less loaded one. That spreads as well as
looking at all of them, and does not send everybody to the one rank whose report is the oldest.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec

from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.messages import Load


class Slot:
    """One DP rank of one member as a place for legs, with what is under way there."""

    __slots__ = ("address", "dp_rank", "in_flight", "instance", "load", "used_count")

    def __init__(self, instance: str, dp_rank: int, address: RankAddress) -> None:
        self.instance = instance
        self.dp_rank = dp_rank
        self.address = address
        """Of the engine's HTTP port."""
        self.load = Load()
        self.in_flight = 0
        """Legs of ours."""
        self.used_count = 0

    def pressure(self, *, pages: int) -> tuple[bool, int, float]:
        """Less is better: whether it lacks the pages, the work in front, the used share."""
        load = self.load
        starved = load.pages_total > 0 and load.pages_free < pages
        # The report is up to a second old, and includes ours: the greater number is the truer one.
        work = max(self.in_flight, load.rooms_open) + load.queued
        used = 1.0 - load.pages_free / load.pages_total if load.pages_total else 0.0
        return starved, work, used


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One usable member as `choose_pair` sees it."""

    instance: str
    role: Role
    incarnation: str
    fingerprint: str
    digest: str
    """Of its tokenizer."""
    bootstrap: RankAddress
    dp_size: int
    slots: tuple[Slot, ...]


class Place(msgspec.Struct, frozen=True):
    """One side of a pair: a rank of a member."""

    member: Candidate
    slot: Slot


class Placement(msgspec.Struct, frozen=True):
    """A chosen pair."""

    prefill: Place
    decode: Place

    def of(self, role: Role) -> Place:
        return self.prefill if role is Role.PREFILL else self.decode


class Group(msgspec.Struct, frozen=True):
    """The ranks that can be paired with each other, both sides at least one."""

    digest: str
    prefills: tuple[Place, ...]
    decodes: tuple[Place, ...]


def form_groups(candidates: Iterable[Candidate]) -> tuple[Group, ...]:
    """The groups among these members; it takes time with their number, so its result is kept."""
    places: dict[tuple[str, str], dict[Role, list[Place]]] = {}
    for member in candidates:
        sides = places.setdefault(
            (member.fingerprint, member.digest), {Role.PREFILL: [], Role.DECODE: []}
        )
        sides[member.role] += [Place(member, slot) for slot in member.slots]
    return tuple(
        Group(digest, tuple(sides[Role.PREFILL]), tuple(sides[Role.DECODE]))
        for (_, digest), sides in places.items()
        if all(sides.values())
    )


def choose_pair(
    groups: Sequence[Group],
    dice: random.Random,
    *,
    pages: int = 0,
    digest: str | None = None,
    in_turn: bool = False,
) -> Placement | None:
    """A prefill and a decode rank of one group, or None.

    `pages`: what the sequence will need at decode. `digest`: the tokenizer that made its ids; None
    takes any. `in_turn`: by turns instead of by load.
    """
    if digest is not None:
        groups = [group for group in groups if group.digest == digest]
    if not groups:
        return None
    # More decode ranks serve more sequences: groups are used by that share.
    group = groups[0]
    if len(groups) > 1:
        group = dice.choices(groups, [len(each.decodes) for each in groups])[0]
    return Placement(
        _choose(group.prefills, dice, pages=0, in_turn=in_turn),
        _choose(group.decodes, dice, pages=pages, in_turn=in_turn),
    )


def _choose(places: Sequence[Place], dice: random.Random, *, pages: int, in_turn: bool) -> Place:
    if len(places) == 1:
        return places[0]
    if in_turn:
        return min(places, key=lambda place: place.slot.used_count)
    if len(places) > 2:
        places = dice.sample(places, 2)
    # Between equals the one that was used less, so that an idle cluster takes turns.
    return min(places, key=lambda place: (place.slot.pressure(pages=pages), place.slot.used_count))
