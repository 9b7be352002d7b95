"""The soak's own eyes: a wrong token, a second end, a late one, and a leak are seen."""

from __future__ import annotations

from typing import Any

import pytest

from soak.leaks import BYTES_MORE_MAX, Footprint, History
from soak.processes import Kind
from soak.questions import End, Seen, judge
from soak.tally import Tally, details, table
from support.cluster import Ended

TOPS = [[(-0.5, 1)], [(-0.25, 2)], [(-0.125, 3)]]
RIGHT = Ended(200, [1, 2, 3], TOPS, done=True)
ERROR = {"message": "prefill died", "code": "EngineDied", "leg": "prefill"}


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        (End.RIGHT, RIGHT),
        (End.RIGHT, Ended(200, [1, 2, 3], [], done=True)),
        (End.WRONG, Ended(200, [1, 2, 4], [], done=True)),
        (End.WRONG, Ended(200, [1, 2], [], done=True)),
        (End.WRONG, Ended(200, [1, 2, 3], [[(-0.5, 1)], [(-0.75, 2)]], done=True)),
        (End.WRONG, Ended(200, [2], [], error=ERROR)),
        (End.FAILED, Ended(502, [], [], error=ERROR)),
        (End.FAILED, Ended(200, [1, 2], [], error=ERROR)),
        (End.UNCLEAR, Ended(502, [], [], error=ERROR | {"leg": ""})),
        (End.UNCLEAR, Ended(200, [1], [], error=ERROR, ends=2)),
        (End.UNCLEAR, Ended(200, [1, 2, 3], [], done=True, ends=2)),
        (End.CUT, Ended(200, [1, 2], [], ends=0)),
        (End.CUT, Ended(0, [], [], ends=0)),
    ],
)
def test_an_end_is_judged(end: End, seen: Ended) -> None:
    assert end is judge(RIGHT, seen, 1.0, exact=True).end


def test_logprobs_are_compared_in_mode_exact_only() -> None:
    seen = Ended(200, [1, 2, 3], [[(-0.75, 1)]], done=True)
    assert End.WRONG is judge(RIGHT, seen, 1.0, exact=True).end
    assert End.RIGHT is judge(RIGHT, seen, 1.0, exact=False).end


@pytest.mark.parametrize(
    ("kind", "end", "at", "violations"),
    [
        (Kind.ENGINE, End.RIGHT, 70.0, 0),
        (Kind.ENGINE, End.FAILED, 11.0, 0),
        (Kind.ENGINE, End.FAILED, 12.5, 1),
        (Kind.ENGINE, End.CUT, 10.1, 1),
        (Kind.ENGINE, End.WRONG, 10.1, 1),
        (Kind.ENGINE, End.UNCLEAR, 10.1, 1),
        (Kind.ROUTER, End.CUT, 10.1, 0),
        (Kind.ROUTER, End.CUT, 12.5, 1),
        (Kind.SIDECAR, End.FAILED, 10.1, 1),
    ],
)
def test_a_running_request_must_end_as_its_cause_allows(
    kind: Kind, end: End, at: float, violations: int
) -> None:
    tally = Tally("x", kind=kind)
    tally.ran(Seen(end, at, leg="decode", reason="EngineDied"), 10.0)
    assert violations == len(tally.violations), tally.violations


def test_a_request_that_arrives_while_a_sidecar_is_away_may_fail_clearly() -> None:
    tally = Tally("x", kind=Kind.SIDECAR)
    tally.arrived(Seen(End.FAILED, 10.1, leg="prefill", reason="PeerUnreachable"), 10.0)
    assert [] == tally.violations


def test_a_later_request_must_be_right_and_the_report_says_what_was_not() -> None:
    tally = Tally("router", kind=Kind.ROUTER)
    tally.served([Seen(End.RIGHT, 1.0), Seen(End.FAILED, 1.0, "decode", "NotReady", "no pair")])
    tally.ran(Seen(End.FAILED, 1.5, "decode", "EngineDied"), 1.0)
    [head, row] = table([tally])
    assert ("3", "1", "1", "2") == tuple(
        row[head.index(name)] for name in ("REQUESTS", "RUNNING", "RIGHT", "FAILED")
    )
    assert "router: 1 ended with EngineDied of decode" in details(tally)
    assert "decode NotReady no pair" in details(tally)[-1]


def look(*, sockets: int = 5, threads: int = 3, anonymous_bytes: int = 1 << 20) -> Any:
    return {"router": Footprint({"socket": sockets, "pipe": 2}, threads, anonymous_bytes)}


def history(*looks: Any) -> History:
    made = History()
    for one in looks:
        made.add(one)
    return made


def test_what_grows_round_by_round_is_a_leak() -> None:
    def leaks(**by_round: Any) -> list[str]:
        rounds = [look(**{k: v(n) for k, v in by_round.items()}) for n in range(20)]
        return history(*rounds).leaks()

    assert [] == leaks(sockets=lambda _: 5)
    assert "descriptors" in leaks(sockets=lambda n: 5 + n)[0]
    assert "threads" in leaks(threads=lambda n: 3 + n)[0]
    each = BYTES_MORE_MAX // 7
    assert "bytes" in leaks(anonymous_bytes=lambda n: each * n)[0]
    # A pool that grows at first, or breathes, is none; neither is a slow cache.
    assert [] == leaks(sockets=lambda n: 5 + 8 * min(n, 3))
    assert [] == leaks(sockets=lambda n: 5 + 10 * (n % 3))
    assert [] == leaks(anonymous_bytes=lambda n: each // 4 * n)


def test_a_process_that_came_is_a_leak_after_any_number_of_rounds() -> None:
    more = look() | {"orphan": look()["router"]}
    assert ["orphan runs, and did not before"] == history(look(), more).leaks()
