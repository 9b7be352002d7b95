"""The choice of a pair and the queue before it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.messages import Load
from pdcluster_sidecar.router.admission import Admission
from pdcluster_sidecar.router.pick import Candidate, Placement, Slot, choose_pair, form_groups

ADDRESS = RankAddress("127.64.0.1", 1)


def member(
    role: Role, number: int = 0, *, dp: int = 1, fingerprint: str = "f", digest: str = "t"
) -> Candidate:
    name = f"{role}-{number}"
    return Candidate(
        instance=name,
        role=role,
        incarnation=name,
        fingerprint=fingerprint,
        digest=digest,
        bootstrap=ADDRESS,
        dp_size=dp,
        slots=tuple(Slot(name, rank, ADDRESS) for rank in range(dp)),
    )


def chosen(members: list[Candidate], seed: int = 1, **how: object) -> Placement:
    dice = random.Random(seed)
    placement = choose_pair(form_groups(members), dice, **how)  # type: ignore[arg-type]  # A bag of options.
    assert placement is not None
    return placement


@pytest.mark.parametrize(
    ("members", "digest", "paired"),
    [
        ([], None, False),
        ([member(Role.PREFILL)], None, False),
        ([member(Role.PREFILL), member(Role.DECODE, fingerprint="g")], None, False),
        ([member(Role.PREFILL), member(Role.DECODE, digest="u")], None, False),
        ([member(Role.PREFILL), member(Role.DECODE)], "u", False),
        ([member(Role.PREFILL), member(Role.DECODE)], "t", True),
    ],
)
def test_there_is_no_pair_without_both_sides_of_one_group(
    members: list[Candidate], digest: str | None, *, paired: bool
) -> None:
    pair = choose_pair(form_groups(members), random.Random(1), digest=digest)

    assert paired is (pair is not None)


def test_an_idle_cluster_is_used_by_turns() -> None:
    members = [member(Role.PREFILL), *(member(Role.DECODE, number) for number in range(3))]
    used: Counter[str] = Counter()
    for seed in range(300):
        place = chosen(members, seed).decode
        place.slot.used_count += 1
        used[place.member.instance] += 1

    assert 3 == len(used)
    assert max(used.values()) - min(used.values()) <= 60


def test_of_two_the_one_with_less_work_is_taken() -> None:
    quiet, busy = member(Role.DECODE, 0), member(Role.DECODE, 1)
    quiet.slots[0].in_flight, busy.slots[0].load = 2, Load(rooms_open=3)
    members = [member(Role.PREFILL), busy, quiet]

    assert quiet is chosen(members).decode.member
    quiet.slots[0].load = Load(queued=5)
    assert busy is chosen(members).decode.member


def test_who_lacks_the_pages_is_the_last_choice() -> None:
    small, large = member(Role.DECODE, 0), member(Role.DECODE, 1)
    small.slots[0].load = Load(pages_free=3, pages_total=100)
    large.slots[0].load = Load(pages_free=50, pages_total=100, rooms_open=9)
    members = [member(Role.PREFILL), small, large]

    assert small is chosen(members, pages=3).decode.member
    assert large is chosen(members, pages=4).decode.member


def test_groups_are_used_by_their_share_of_decode_ranks() -> None:
    members = [
        member(Role.PREFILL, 0, fingerprint="old"),
        member(Role.DECODE, 0, fingerprint="old", dp=3),
        member(Role.PREFILL, 1, fingerprint="new"),
        member(Role.DECODE, 1, fingerprint="new"),
    ]
    used = Counter(chosen(members, seed).decode.member.fingerprint for seed in range(400))

    assert 250 <= used["old"] <= 350
    for seed in range(50):
        pair = chosen(members, seed)
        assert pair.prefill.member.fingerprint == pair.decode.member.fingerprint


def test_in_turn_every_rank_comes_once_a_round() -> None:
    members = [member(Role.PREFILL), member(Role.DECODE, dp=4)]
    ranks = []
    for seed in range(8):
        slot = chosen(members, seed, in_turn=True).decode.slot
        slot.used_count += 1
        ranks.append(slot.dp_rank)

    assert [0, 1, 2, 3, 0, 1, 2, 3] == ranks


class Waiting:
    """A sequence in the queue."""

    pages_needed = 1
    digest = None

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.placement: Placement | None = None

    def placed(self, placement: Placement) -> None:
        self.log.append(self.name)
        self.placement = placement


def queue(members: list[Candidate], *, in_flight: int = 1, queued: int = 2) -> Admission:
    return Admission(
        lambda: form_groups(members),
        random.Random(1),
        max_in_flight=in_flight,
        max_queued=queued,
        in_turn=False,
    )


def test_places_are_given_in_order_and_a_retry_comes_first() -> None:
    log: list[str] = []
    admission = queue([member(Role.PREFILL), member(Role.DECODE)])
    first, second, third, again = (Waiting(name, log) for name in ("1", "2", "3", "again"))
    for waiter in (first, second, third):
        admission.enter(waiter)
    admission.enter(again, first=True)
    assert (1, 3) == (admission.in_flight_count, admission.queued_count)

    for waiter in (first, again, second):
        assert waiter.placement is not None
        admission.release(waiter.placement, prefill_released=False)

    assert ["1", "again", "2", "3"] == log


def test_work_in_flight_is_counted_at_both_ranks_until_it_is_released() -> None:
    prefill, decode = member(Role.PREFILL), member(Role.DECODE)
    admission = queue([prefill, decode], in_flight=5)
    waiter = Waiting("1", [])
    admission.enter(waiter)
    assert (1, 1) == (prefill.slots[0].in_flight, decode.slots[0].in_flight)

    assert waiter.placement is not None
    prefill.slots[0].in_flight -= 1
    admission.release(waiter.placement, prefill_released=True)
    assert (0, 0) == (prefill.slots[0].in_flight, decode.slots[0].in_flight)


def test_nobody_is_placed_while_there_is_no_pair() -> None:
    log: list[str] = []
    members = [member(Role.PREFILL)]
    admission = queue(members)
    admission.enter(Waiting("1", log))
    assert not admission.has_pair(None)

    members.append(member(Role.DECODE))
    admission.wake()
    assert ["1"] == log


def test_who_leaves_the_queue_is_not_placed() -> None:
    log: list[str] = []
    members = [member(Role.PREFILL)]
    admission = queue(members)
    gone = Waiting("gone", log)
    admission.enter(gone)
    admission.leave(gone)
    admission.leave(gone)

    members.append(member(Role.DECODE))
    admission.wake()
    assert [] == log


def test_the_queue_takes_what_can_run_or_wait() -> None:
    admission = queue([], in_flight=3, queued=2)
    assert admission.takes(3)
    assert not admission.takes(4)

    for number in range(2):
        admission.enter(Waiting(str(number), []))
    assert admission.takes(1)
    assert not admission.takes(2)


def test_a_waiter_that_ends_while_it_is_placed_does_not_confuse_the_queue() -> None:
    log: list[str] = []
    admission = queue([member(Role.PREFILL), member(Role.DECODE)])

    class Brief(Waiting):
        def placed(self, placement: Placement) -> None:
            super().placed(placement)
            admission.release(placement, prefill_released=False)

    for name in ("1", "2", "3"):
        admission.enter(Brief(name, log))

    assert ["1", "2", "3"] == log
    assert (0, 0) == (admission.in_flight_count, admission.queued_count)
