"""What the engine's threads count and log.

Logs are structlog JSON on stderr, INFO at most twice a request: admitted and concluded. No metric
has a label per room.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdcluster_protocol.messages import Load


class Telemetry:
    """The metrics of one engine process; a registry of one's own is for tests."""

    __slots__ = (
        "_bytes_of",
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
        self._bytes_of: dict[str, Counter] = {}

    def show_loads(self, load: Callable[[], Load]) -> None:
        """Let the gauges ask for the load when somebody reads them; a turn of the loop is short."""
        for state, pages in (
            ("free", lambda seen: seen.pages_free),
            ("owned", _owned),
            ("quarantined", lambda seen: seen.pages_quarantined),
        ):
            self.pages.labels(state).set_function(_asking(load, pages))
        for queue, count in (
            ("rooms", lambda seen: seen.rooms_open),
            ("waiting", lambda seen: seen.queued),
            ("running", lambda seen: seen.running),
        ):
            self.queue.labels(queue).set_function(_asking(load, count))

    def count_bytes(self, kind: str, nbytes: int) -> None:
        """Add to one kind of bytes; a request has a dozen of these."""
        counter = self._bytes_of.get(kind)
        if counter is None:
            counter = self._bytes_of[kind] = self.kv_bytes.labels(kind)
        counter.inc(nbytes)


def _owned(load: Load) -> int:
    return load.pages_total - load.pages_free - load.pages_quarantined


def _asking(load: Callable[[], Load], number: Callable[[Load], int]) -> Callable[[], float]:
    def ask() -> float:
        return number(load())

    return ask


def configure_logging(**bound: object) -> structlog.typing.FilteringBoundLogger:
    """A logger that writes JSON lines to stderr.

    Every line of the process has the `bound` keys, whichever module's logger wrote it.
    """
    encode = msgspec.json.Encoder(enc_hook=repr).encode

    def render(
        _logger: structlog.typing.WrappedLogger, level: str, event: structlog.typing.EventDict
    ) -> bytes:
        timestamp = utc_timestamp(time.time_ns())
        return encode({**bound, **event, "level": level, "timestamp": timestamp})

    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def utc_timestamp(unix_nanoseconds: int) -> str:
    """A moment as ISO 8601 with microseconds; a busy process writes thousands of lines a second."""
    seconds, nanoseconds = divmod(unix_nanoseconds, 1_000_000_000)
    return f"{_utc_second(seconds)}.{nanoseconds // 1000:06d}Z"


@functools.lru_cache(maxsize=1)
def _utc_second(unix_seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_seconds))
