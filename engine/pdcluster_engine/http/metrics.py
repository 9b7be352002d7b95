"""What the HTTP side counts: ends of requests by reason, and how long their phases took."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from pdcluster_protocol.errors import HTTP_STATUS, Reason
from pdcluster_protocol.ids import Role

BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class HttpMetrics:
    """The metrics of one engine's HTTP side; a registry of one's own is for tests."""

    __slots__ = ("_phases", "_requests", "_role", "registry")

    def __init__(self, role: Role, registry: CollectorRegistry = REGISTRY) -> None:
        self._role = role.value
        self.registry = registry
        self._requests = Counter(
            "pdcluster_requests",
            "Requests that ended at this process.",
            ["role", "outcome", "reason"],
            registry=registry,
        )
        self._phases = Histogram(
            "pdcluster_phase_seconds",
            "Time that a request spent in a phase.",
            ["role", "phase"],
            buckets=BUCKETS_SECONDS,
            registry=registry,
        )

    def ended(self, reason: Reason | None) -> None:
        """Count the end of a request: `ok`, `refused` (the client's fault), `gone` or `failed`."""
        if reason is None:
            outcome = "ok"
        elif reason is Reason.CLIENT_GONE:
            outcome = "gone"
        else:
            outcome = "refused" if HTTP_STATUS.get(reason, 500) < 500 else "failed"
        self._requests.labels(self._role, outcome, reason.value if reason else "").inc()

    def spent(self, phase: str, seconds: float) -> None:
        """Record the length of `tokenise`, `first_token` or `answer`."""
        self._phases.labels(self._role, phase).observe(seconds)
