"""What the router counts: requests by outcome, phases, queue; the label sets are closed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import accumulate
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from pdcluster_protocol.errors import Reason

ROLE: Final = "router"
BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)


class Outcome(StrEnum):
    """How a client's request ended."""

    ANSWERED = "answered"
    FAILED = "failed"
    REFUSED = "refused"
    GONE = "gone"


class Phase(StrEnum):
    """What a sequence's time is spent on."""

    QUEUE = "queue"
    FIRST_BYTE = "first_byte"
    """From dispatch to the first event, or to the whole of a plain answer."""
    TOTAL = "total"


class PhaseTimes(Collector):
    """The histogram of all phases, counted on the router's one thread.

    The library's own takes a lock twice for every value; three values a request are a few per cent
    of its time.
    """

    def __init__(self) -> None:
        self._counts = {phase: [0] * (len(BUCKETS) + 1) for phase in Phase}
        self._sums = dict.fromkeys(Phase, 0.0)

    def observe(self, phase: Phase, seconds: float) -> None:
        self._counts[phase][bisect_left(BUCKETS, seconds)] += 1
        self._sums[phase] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What the registry asks for."""
        family = HistogramMetricFamily(
            "pdcluster_phase_seconds", "Seconds of a sequence's phases", labels=["role", "phase"]
        )
        names = [*map(str, BUCKETS), "+Inf"]
        for phase, counts in self._counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric([ROLE, phase], buckets, self._sums[phase])
        yield family


class Metrics:
    """Everything that this process counts; children are made once, since making them is slow."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "pdcluster_requests",
            "Requests of clients that ended",
            ["role", "outcome", "reason"],
            registry=self.registry,
        )
        self._by_end: dict[tuple[Outcome, str], Counter] = {}
        self._phases = PhaseTimes()
        self.registry.register(self._phases)
        self.retries = Counter(
            "pdcluster_retries", "Sequences that were tried again", registry=self.registry
        )
        self.aborts = Counter("pdcluster_aborts", "Legs aborted", registry=self.registry)

    def ended(self, outcome: Outcome, reason: Reason | None) -> None:
        """Count one client request; reasons are a closed set, so the children are bounded."""
        key = (outcome, reason or "")
        child = self._by_end.get(key)
        if child is None:
            child = self._by_end[key] = self._requests.labels(ROLE, outcome, reason or "")
        child.inc()

    def spent(self, phase: Phase, seconds: float) -> None:
        self._phases.observe(phase, seconds)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def render(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
