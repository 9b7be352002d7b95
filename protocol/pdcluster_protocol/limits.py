"""Every bound and every clock, in one place each.

`Timeouts` come from the `PDCluster` object (`spec.timeouts`), `Limits` are ours. Clocks measure
progress where they can: the transfer clock is "no byte for `stall_seconds`" under a total that
grows with the prompt.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import ConfigError


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds; each clock starts with the event it measures and its error names it."""

    queue_seconds: float = 60.0
    """From arrival at the router to a chosen pair."""
    bootstrap_seconds: float = 300.0
    """From a leg's arrival to metadata on both sides."""
    stall_seconds: float = 30.0
    """No byte and no chunk of a request for so long: it ends."""
    transfer_seconds: float = 300.0
    """Total from metadata to the last verified page, for a prompt of `max_context`."""
    abort_seconds: float = 30.0
    """From a cancel to the last ABORT_ACK; then the owner of the pages fences."""
    drain_seconds: float = 600.0
    """For running rooms at shutdown."""
    startup_seconds: float = 1800.0
    """From process start to ready."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            # Written so that NaN is refused as well.
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"timeouts.{name} is {getattr(self, name)}; it must be positive")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of queues, tables and messages."""

    rooms_max: int = 4096
    """Open rooms of one node."""
    waiting_rooms_max: int = 4096
    """Metadata that arrived before its leg."""
    tombstones_max: int = 65536
    story_length_max: int = 64
    stories_max: int = 1024
    peers_max: int = 1024
    message_bytes_max: int = 8 << 20
    frames_max: int = 64
    pages_per_request_max: int = 1 << 20
    runs_per_message_max: int = 256
    runs_per_status_max: int = 32
    """So many runs ride in a final status instead of going before it."""
    run_bytes_max: int = 4 << 20
    """A run of pages is cut so that one write is at most this long."""
    writes_in_flight_per_peer: int = 16
    body_bytes_max: int = 16 << 20
    link_queue_max: int = 65536
    retransmit_seconds_min: float = 0.2
    retransmit_seconds_max: float = 2.0
    accept_seconds: float = 0.1
    """Metadata is answered by what follows from it, or after so long: before its first repeat."""
    rewrite_seconds: float = 1.0
    """After a write that failed: wait so long for the peer's new session, then write again."""
    rewrites_max: int = 6
    """So often to one session; together as long as it takes to map the memory anew, with a sidecar
    that restarts meanwhile and two repeats that are lost."""
    gone_sessions_idle_max: int = 3
    """Transport sessions of peers that are gone while our transport keeps connections to them, up
    to four for each: with more of them it is replaced while nobody is delayed."""
    gone_sessions_max: int = 63
    """With more of them it is replaced at once."""
    clock_skew_seconds: float = 60.0
    """How far router clocks may differ before an attempt is refused as stale."""
    ping_seconds: float = 1.0
    unknown_after_seconds: float = 2.0
    dead_after_seconds: float = 10.0
    quarantine_fraction_max: float = 0.05
    """Quarantined share of the pool above which the memory's owner fences."""
