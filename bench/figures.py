"""Numbers for people: percentiles, aligned tables, and limits that were kept or missed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """One figure against its limit."""

    what: str
    figure: float
    limit: float
    unit: str
    floor: bool = False
    """The limit is the least that is wanted, not the most."""

    @property
    def kept(self) -> bool:
        """Whether the figure is on the wanted side of the limit."""
        return self.figure >= self.limit if self.floor else self.figure <= self.limit

    def __str__(self) -> str:
        word = "kept" if self.kept else "MISSED"
        side = "least" if self.floor else "most"
        return f"{word:6}  {self.what}: {self.figure:.4g} of at {side} {self.limit:g} {self.unit}"


class Unmeasured(msgspec.Struct, frozen=True):
    """What could not be measured is missed: nobody knows."""

    what: str
    why: str
    kept: bool = False

    def __str__(self) -> str:
        return f"MISSED  {self.what}: not measured; {self.why}"


QUICK_TIMES = 2


class Report:
    """What a benchmark prints, and the verdicts that the summary repeats."""

    def __init__(self, *, quick: bool = False) -> None:
        self.verdicts: list[Verdict | Unmeasured] = []
        self._quick = quick

    def times(self, count: int) -> int:
        """How often to repeat: `count`, or hardly at all when only the way is tried."""
        return min(count, QUICK_TIMES) if self._quick else count

    def title(self, text: str) -> None:
        print(f"\n=== {text}", flush=True)

    def line(self, text: str = "") -> None:
        print(text, flush=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Columns as wide as their widest cell; numbers are already formatted."""
        cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
        for row in cells:
            first, *others = zip(row, widths, strict=True)
            ends = (cell.rjust(width) for cell, width in others)
            print("  ".join((first[0].ljust(first[1]), *ends)).rstrip())
        print(flush=True)

    def limit(self, what: str, figure: float, *, limit: float, unit: str) -> None:
        """Compare a figure with the most that it may be."""
        self._judge(Verdict(what, figure, limit, unit))

    def floor(self, what: str, figure: float, *, floor: float, unit: str) -> None:
        """Compare a figure with the least that it is to be."""
        self._judge(Verdict(what, figure, floor, unit, floor=True))

    def unmeasured(self, what: str, why: str) -> None:
        """Say that there is no figure; it counts as missed."""
        self._judge(Unmeasured(what, why))

    def _judge(self, verdict: Verdict | Unmeasured) -> None:
        self.verdicts.append(verdict)
        print(f"  {verdict}", flush=True)

    def summary(self) -> int:
        """Name what was missed; the number of misses."""
        missed = [verdict for verdict in self.verdicts if not verdict.kept]
        print(f"\n=== {len(self.verdicts)} limits, {len(missed)} missed")
        for verdict in missed:
            print(f"  {verdict}")
        return len(missed)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest of the sorted values."""
    if len(values) == 1:
        return values[0]
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = min(int(place), len(ordered) - 2)
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def ms(seconds: float) -> str:
    """Milliseconds, for a cell."""
    return f"{seconds * 1000:.1f}"
