"""What is counted over all rounds of one cause, and what must never be among it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from soak.processes import Kind
from soak.questions import End, Seen

END_SECONDS_MAX = 2.0
"""From the cause to the end of a request that fails of it."""
DETAILS_MAX = 20


class Tally:
    """One victim, or the clients that leave."""

    def __init__(self, name: str, *, kind: Kind | None = None) -> None:
        self.name = name
        self._kind = kind
        self.rounds = 0
        self.running: Counter[End] = Counter()
        """Requests that ran when the cause came, by their end."""
        self.arriving: Counter[End] = Counter()
        """Requests that came right after it."""
        self.unharmed: Counter[End] = Counter()
        """Requests that ended before, or came when everything served again."""
        self.reasons: Counter[tuple[str, str]] = Counter()
        """Failed ones by leg and reason."""
        self.moments: Counter[str] = Counter()
        """How often the cause came when."""
        self.slowest_end_seconds = 0.0
        """Of a failed or cut request, from the cause on."""
        self.longest_outage_seconds = 0.0
        """From the cause until everything serves again."""
        self.violations: list[str] = []

    @property
    def requests(self) -> int:
        """All requests of all rounds."""
        return sum((self.running + self.arriving + self.unharmed).values())

    @property
    def cut_may_be(self) -> bool:
        """Whether a closed connection is the one clear end that is left."""
        return self._kind is Kind.ROUTER

    def ran(self, seen: Seen, cause_at: float) -> None:
        """A request that ran when the cause came has ended."""
        self.running[seen.end] += 1
        self._check(seen, cause_at, "running")
        if self._kind is Kind.SIDECAR and seen.end is End.FAILED:
            self.violated(f"a killed sidecar failed a running request: {_told(seen)}")

    def arrived(self, seen: Seen, cause_at: float) -> None:
        """A request that came right after the cause has ended."""
        self.arriving[seen.end] += 1
        self._check(seen, cause_at, "arriving")

    def served(self, seens: Iterable[Seen]) -> None:
        """Requests that ended before the cause, or came after it was over: all must be right."""
        for seen in seens:
            self.unharmed[seen.end] += 1
            if seen.end is not End.RIGHT:
                self.violated(f"an earlier or later request: {_told(seen)}")

    def violated(self, what: str) -> None:
        """Note what must not be."""
        self.violations.append(f"{self.name}, round {self.rounds + 1}: {what}")

    def _check(self, seen: Seen, cause_at: float, what: str) -> None:
        if seen.end in (End.WRONG, End.UNCLEAR) or (seen.end is End.CUT and not self.cut_may_be):
            self.violated(f"a request {what}: {_told(seen)}")
        if seen.end not in (End.FAILED, End.CUT):
            return
        if seen.end is End.FAILED:
            self.reasons[seen.leg, seen.reason] += 1
        late_seconds = seen.at - cause_at
        self.slowest_end_seconds = max(self.slowest_end_seconds, late_seconds)
        if late_seconds > END_SECONDS_MAX:
            self.violated(f"a request {what} ended {late_seconds:.2f} s after: {_told(seen)}")


def _told(seen: Seen) -> str:
    return " ".join(filter(None, (str(seen.end), seen.leg, seen.reason, seen.detail)))


def table(tallies: Iterable[Tally]) -> list[tuple[str, ...]]:
    """One line for each cause, under the names of the columns."""
    rows: list[tuple[str, ...]] = [
        (
            "CAUSE", "ROUNDS", "REQUESTS", "RUNNING", "RIGHT", "FAILED", "CUT", "WRONG", "UNCLEAR",
            "SLOWEST END", "OUTAGE", "VIOLATIONS",
        )
    ]  # fmt: skip
    for tally in tallies:
        ends = tally.running + tally.arriving + tally.unharmed
        rows.append(
            (
                tally.name,
                str(tally.rounds),
                str(tally.requests),
                str(sum(tally.running.values())),
                *(str(ends[end]) for end in (End.RIGHT, End.FAILED, End.CUT, End.WRONG)),
                str(ends[End.UNCLEAR]),
                f"{tally.slowest_end_seconds:.2f} s",
                f"{tally.longest_outage_seconds:.2f} s",
                str(len(tally.violations)),
            )
        )
    return rows


def details(tally: Tally) -> list[str]:
    """Why requests failed, when the cause came, and what was violated."""
    lines = []
    for (leg, reason), count in sorted(tally.reasons.items()):
        lines.append(f"{tally.name}: {count} ended with {reason} of {leg}")
    if tally.moments:
        told = ", ".join(f"{count} {moment}" for moment, count in sorted(tally.moments.items()))
        lines.append(f"{tally.name}: came {told}")
    shown = tally.violations[:DETAILS_MAX]
    lines += [f"VIOLATION  {violation}" for violation in shown]
    if len(tally.violations) > len(shown):
        lines.append(f"VIOLATION  {tally.name}: {len(tally.violations) - len(shown)} more")
    return lines
