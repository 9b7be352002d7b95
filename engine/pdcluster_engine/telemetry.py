"""What the engine's threads count and log.

Logs are structlog JSON on stderr, INFO at most twice a request: admitted and concluded. No metric
has a label per room.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

if TYPE_CHECKING:
    from pdcluster_protocol.messages import Load


class Telemetry:
    """The metrics of one engine process; a registry of one's own is for tests."""

    __slots__ = (
        "_load",
        "dropped",
        "injected_faults",
        "kv_bytes",
        "link_joined",
        "loops",
        "pages",
        "prompt_tokens_computed",
        "queue",
        "tokens_generated",
        "transport_restarts",
    )

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.kv_bytes = Counter(
            "pdcluster_kv_bytes",
            "Bytes whose write was confirmed: KV rows, metadata rows; and those written again.",
            ["kind"],
            registry=registry,
        )
        self.dropped = Counter(
            "pdcluster_dropped",
            "Normal but unusable input: stale, doubled or unknown messages, a full queue.",
            ["what"],
            registry=registry,
        )
        self.injected_faults = Counter(
            "pdcluster_injected_faults",
            "Faults that the transport injected on purpose; no series unless a plan asks for them.",
            ["fault"],
            registry=registry,
        )
        self.pages = Gauge(
            "pdcluster_pages", "KV pages of this rank by state.", ["state"], registry=registry
        )
        self.queue = Gauge(
            "pdcluster_queue", "Legs and messages that wait or run.", ["queue"], registry=registry
        )
        self.prompt_tokens_computed = Counter(
            "pdcluster_prompt_tokens_computed",
            "Prompt tokens that went through this engine's model; decode legs compute none.",
            registry=registry,
        )
        self.tokens_generated = Counter(
            "pdcluster_tokens_generated", "Tokens that this engine chose.", registry=registry
        )
        self.link_joined = Gauge(
            "pdcluster_link_joined", "1 while the sidecar has answered hello.", registry=registry
        )
        self.loops = Gauge(
            "pdcluster_owner_loops", "Turns of the owner thread's loop.", registry=registry
        )
        self.transport_restarts = Counter(
            "pdcluster_transport_restarts",
            "Ends of the transfer process: an asked fence or a death.",
            ["cause"],
            registry=registry,
        )
        self._load: Load | None = None

    def show_load(self, load: Load) -> None:
        """Put a load into the gauges; an unchanged one costs a comparison."""
        if load == self._load:
            return
        self._load = load
        owned = load.pages_total - load.pages_free - load.pages_quarantined
        self.pages.labels("free").set(load.pages_free)
        self.pages.labels("owned").set(owned)
        self.pages.labels("quarantined").set(load.pages_quarantined)
        self.queue.labels("rooms").set(load.rooms_open)
        self.queue.labels("waiting").set(load.queued)
        self.queue.labels("running").set(load.running)


def configure_logging(**context: object) -> None:
    """JSON lines on stderr with `context` in each."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _with(context),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _with(context: dict[str, object]) -> structlog.typing.Processor:
    """Context of the process; context variables would not reach its other threads."""

    def add(
        _logger: structlog.typing.WrappedLogger, _name: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**context, **event}

    return add
