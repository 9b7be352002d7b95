"""The engine as its HTTP side sees it (`submission.Engine`); callable from any thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from pdcluster_engine.inbox import Inbox
from pdcluster_engine.legs import LegTable
from pdcluster_engine.loop import OwnerLoop
from pdcluster_engine.submission import EngineState, OutputSink, Submission
from pdcluster_protocol.errors import Reason, RequestFailed
from pdcluster_protocol.events import Drained, LegArrived, LegCancelled
from pdcluster_protocol.ids import Key, attempt_milliseconds
from pdcluster_protocol.layout import token_digest
from pdcluster_protocol.limits import Limits

log = structlog.get_logger()


class NativeEngine:
    """Puts what HTTP wants into the owner's inbox; the answers come through the legs' sinks."""

    __slots__ = ("_inbox", "_legs", "_loop", "_wall_clock")

    def __init__(
        self,
        *,
        inbox: Inbox,
        legs: LegTable,
        loop: OwnerLoop,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._wall_clock = wall_clock
        self._inbox = inbox
        self._legs = legs
        self._loop = loop

    def submit(self, submission: Submission, sink: OutputSink) -> None:
        """Take a sequence.

        Raises:
            Overloaded, RequestFailed: refused at once; nothing will reach the sink.
        """
        if submission.attempt_known:
            self._check_clock(submission.key)
        self._legs.add(submission, sink)
        log.info(
            "admitted",
            rid=submission.rid,
            room=submission.key.room,
            attempt=submission.key.attempt,
            leg=submission.leg,
            prompt_tokens=len(submission.token_ids),
        )
        self._inbox.post(
            LegArrived(
                key=submission.key,
                rid=submission.rid,
                prompt_tokens=len(submission.token_ids),
                prompt_digest=token_digest(submission.token_ids),
                output_tokens_max=submission.output_tokens_max,
                bootstrap=submission.bootstrap,
                prefill_dp_rank=submission.prefill_dp_rank,
                budget_seconds=submission.budget_seconds,
                attempt_known=submission.attempt_known,
            )
        )

    def _check_clock(self, key: Key) -> None:
        """A router whose clock is ahead would make every other router's attempts stale."""
        ahead = attempt_milliseconds(key.attempt) / 1000 - self._wall_clock() / 1e9
        skew = Limits().clock_skew_seconds
        if ahead > skew:
            raise RequestFailed(
                f"pd_attempt {key.attempt} is {ahead:.0f} s ahead of this engine's clock, more than"
                f" {skew:.0f} s; set the router's clock",
                reason=Reason.STALE_ATTEMPT,
                key=key,
            )

    def cancel(self, key: Key, reason: Reason, detail: str = "") -> None:
        """End a sequence; unknown keys cancel nothing."""
        leg = self._legs.find_submitted(key)
        if leg is not None:
            self._inbox.post(LegCancelled(leg.key, reason, detail))

    def cancel_rid(self, rid: str, reason: Reason) -> bool:
        """End the one live sequence with exactly this rid; False when there is none."""
        leg = self._legs.find_rid(rid) if rid else None
        if leg is None:
            return False
        self._inbox.post(LegCancelled(leg.key, reason))
        return True

    def drain(self, seconds: float = 0.0) -> None:
        """Take nothing new from now on, and wait at most so long for what runs.

        That is also what runs at other ranks of the instance, which would not survive us.
        """
        self._legs.draining = True
        self._inbox.post(Drained())
        self._loop.done.wait(seconds)

    def cut(self, detail: str, seconds: float) -> None:
        """End all that still runs with its reason; wait at most so long until everybody has it."""
        running = self._legs.keys()
        for key in running:
            self._inbox.post(LegCancelled(key, Reason.SHUTTING_DOWN, detail))
        self._legs.wait_empty(seconds)

    def state(self) -> EngineState:
        """A snapshot; ready means that a leg sent now can be served."""
        seen = self._loop.snapshot
        return EngineState(
            ready=seen.joined and seen.transport_ready and not self._legs.draining,
            joined=seen.joined,
            loops=seen.loops,
            load=seen.load,
            incarnation=seen.incarnation,
        )
