"""Where the time of a request went, seen from outside: engines' logs and metrics around it.

Each engine logs when it admitted and concluded a leg, and its metrics add up how long the first
token took from there. For requests one after the other the difference between two scrapes is that
one request's. All clocks are one machine's, so the two engines' and the client's times lie on one
line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from bench.answers import NANOSECONDS, Timed
from bench.cluster import Cluster
from bench.figures import median
from pdctl.counters import Sample, parse
from pdctl.web import exchange

SCRAPE_SECONDS = 5.0
LOG_SECONDS = 5.0
ROLES = ("prefill", "decode")


class Line(msgspec.Struct, frozen=True):
    """What is read of a line of an engine's log."""

    event: str
    timestamp: str
    room: int = 0

    @property
    def at(self) -> float:
        """Unix time."""
        return datetime.fromisoformat(self.timestamp).timestamp()


class Leg(msgspec.Struct, frozen=True):
    """One leg at one engine, in Unix time."""

    admitted: float
    first_token: float
    """Seen by the engine's HTTP side."""
    concluded: float


class Steps(msgspec.Struct, frozen=True):
    """The way of one pair's request to its first token, in seconds that follow each other."""

    into: float
    """From the client's sending until both legs are admitted: router, HTTP of the legs."""
    prefill: float
    """From there to prefill's token: handshake, pages, the forward; KV moves meanwhile."""
    hand_over: float
    """From there to decode's first token: the last bytes, their check, metadata."""
    out: float
    """From there to the client: stream through the router."""


class Watch:
    """Reads what the engines tell about the requests between two calls."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._logs = {role: _Tail(cluster.log(role)) for role in ROLES}
        self._sums = self._scrape()

    def leg(self, role: str) -> Leg:
        """The one leg that began and ended at this engine since the last call of `forget`."""
        lines = self._logs[role].until_concluded()
        first_token = self._scrape()[role] - self._sums[role]
        admitted = next(line.at for line in lines if line.event == "admitted")
        concluded = next(line.at for line in lines if line.event == "concluded")
        return Leg(admitted, admitted + first_token, concluded)

    def forget(self) -> None:
        """Whatever happened until now is not to be counted."""
        for tail in self._logs.values():
            tail.skip()
        self._sums = self._scrape()

    def steps(self, timed: Timed) -> Steps:
        """The steps of the pair's request that just ended."""
        prefill, decode = self.leg("prefill"), self.leg("decode")
        both = max(prefill.admitted, decode.admitted)
        return Steps(
            into=both - timed.sent_at,
            prefill=prefill.first_token - both,
            hand_over=decode.first_token - prefill.first_token,
            out=timed.sent_at + timed.first_token - decode.first_token,
        )

    def _scrape(self) -> dict[str, float]:
        return {
            role: value_sum(
                scrape(f"{self._cluster.engine(role)}/metrics"),
                "pdcluster_phase_seconds_sum",
                phase="first_token",
            )
            for role in ROLES
        }


class _Tail:
    """The lines that a growing log got since it was last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = path.stat().st_size

    def skip(self) -> None:
        self._read_bytes = self._path.stat().st_size

    def until_concluded(self) -> list[Line]:
        """All new lines, once a leg's last one is among them."""
        deadline = time.monotonic() + LOG_SECONDS
        while True:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                complete = file.read().rpartition(b"\n")[0]
            lines = [msgspec.json.decode(line, type=Line) for line in complete.splitlines()]
            if any(line.event == "concluded" for line in lines):
                self._read_bytes += len(complete) + 1
                return lines
            if time.monotonic() > deadline:
                message = f"{self._path.name} tells of no conclusion within {LOG_SECONDS:g} s"
                raise RuntimeError(message)
            time.sleep(0.002)


def medians(steps: Sequence[Steps]) -> Steps:
    """Each step's median."""
    return Steps(
        into=median([step.into for step in steps]),
        prefill=median([step.prefill for step in steps]),
        hand_over=median([step.hand_over for step in steps]),
        out=median([step.out for step in steps]),
    )


def scrape(url: str) -> list[Sample]:
    """The samples of one process."""
    answer = exchange("GET", url, timeout_seconds=SCRAPE_SECONDS)
    return list(parse(answer.body.decode()))


def value_sum(samples: Sequence[Sample], name: str, **labels: str) -> float:
    """The sum over all children with these labels."""
    return sum(
        value
        for sample, found, value in samples
        if sample == name and all(found.get(key) == want for key, want in labels.items())
    )


def process_cpu_seconds(pid: int) -> float:
    """On-CPU time of all threads, to the nanosecond; /proc/PID/stat counts in ticks of 10 ms."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / NANOSECONDS
