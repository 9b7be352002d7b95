"""Logs as JSON on stderr and metrics for Prometheus; the label sets are closed, never a room."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from enum import StrEnum
from typing import Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest

from pdcluster_protocol.messages import PeerState

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Dropped(StrEnum):
    """Why a message between ranks was not delivered."""

    MALFORMED = "malformed"
    UNAUTHORIZED = "unauthorized"
    UNSIGNED = "unsigned"
    UNKNOWN_SESSION = "unknown_session"
    STALE_INCARNATION = "stale_incarnation"
    FOREIGN_ADDRESS = "foreign_address"
    UNKNOWN_PEER = "unknown_peer"
    PEER_FULL = "peer_full"
    LINK_FULL = "link_full"
    NO_ENGINE = "no_engine"


class Metrics:
    """Everything that this process counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._ranks = Gauge(
            "pdcluster_registered_ranks", "Ranks with an open link", registry=self.registry
        )
        peers = Gauge("pdcluster_peers", "Known peers by state", ["state"], registry=self.registry)
        self._peers = {state: peers.labels(state) for state in PeerState}
        dropped = Counter(
            "pdcluster_messages_dropped",
            "Messages between ranks that were not delivered",
            ["reason"],
            registry=self.registry,
        )
        self._dropped = {reason: dropped.labels(reason) for reason in Dropped}
        messages = Counter(
            "pdcluster_messages", "Messages relayed", ["direction"], registry=self.registry
        )
        self.received = messages.labels("in")
        self.sent = messages.labels("out")
        self.peer_failures = Counter(
            "pdcluster_peer_failures", "Peers that were found dead", registry=self.registry
        )
        self.engine_deaths = Counter(
            "pdcluster_engine_deaths", "Incarnations that ended here", registry=self.registry
        )
        self.unauthorized = Counter(
            "pdcluster_unauthorized", "HTTP requests answered with 401", registry=self.registry
        )
        self.cancels = Counter(
            "pdcluster_cancels", "Legs cancelled by a router", registry=self.registry
        )

    def drop(self, reason: Dropped) -> None:
        """Count one message that was not delivered."""
        self._dropped[reason].inc()

    def set_ranks(self, count: int) -> None:
        """How many ranks have an open link."""
        self._ranks.set(count)

    def set_peers(self, counts: dict[PeerState, int]) -> None:
        """How many peers are in each state."""
        for state, gauge in self._peers.items():
            gauge.set(counts.get(state, 0))

    def render(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


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


def log_callbacks(
    loop: asyncio.AbstractEventLoop, log: structlog.typing.FilteringBoundLogger
) -> None:
    """Let faults that reach the loop come into the log with their traceback."""
    loop.set_exception_handler(
        lambda _, context: log.error(
            "callback failed", detail=context.get("message"), exc_info=context.get("exception")
        )
    )


def utc_timestamp(unix_nanoseconds: int) -> str:
    """A moment as ISO 8601 with microseconds; a busy process writes thousands of lines a second."""
    seconds, nanoseconds = divmod(unix_nanoseconds, 1_000_000_000)
    return f"{_utc_second(seconds)}.{nanoseconds // 1000:06d}Z"


@functools.lru_cache(maxsize=1)
def _utc_second(unix_seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_seconds))
