"""One supervised process: a pid that cannot be mistaken, its restarts, its backoff.

A pidfd is held for as long as the process is ours, so a signal can never hit another process that
was given the same number, and its end is an event of the selector, whoever its parent is.
"""

from __future__ import annotations

import contextlib
import os
import signal

from pdctl.processes import ProcessPhase, ProcessSpec, ProcessState


class Child:
    """The life of one `ProcessSpec` over its restarts."""

    __slots__ = (
        "_backoff_seconds",
        "_started_at",
        "last_exit",
        "phase",
        "pid",
        "pidfd",
        "restarts",
        "spec",
        "warm",
    )

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.phase = ProcessPhase.STOPPED
        self.pid = 0
        self.pidfd = -1
        self.restarts = 0
        self.last_exit: int | None = None
        self.warm = False
        self._backoff_seconds = 0.0
        self._started_at = 0.0

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been seen to end."""
        return self.pidfd >= 0

    def asked(self, now: float) -> None:
        """A start was asked for; the pid may come later."""
        self.phase = ProcessPhase.STARTING
        self._started_at = now

    def running(self, pid: int) -> bool:
        """Take hold of the process; False when it is already gone."""
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self.pid = pid
        self.phase = ProcessPhase.RUNNING
        return True

    def ended(
        self, status: int | None, now: float, *, first: float, most: float, healthy: float
    ) -> float:
        """Note the end; the seconds to wait before the next start.

        They double from `first` to `most` while the process keeps ending within `healthy` seconds.
        """
        self._let_go()
        self.last_exit = status
        self.phase = ProcessPhase.BACKOFF
        self.restarts += 1
        if now - self._started_at >= healthy:
            self._backoff_seconds = 0.0
        wait = max(first, min(most, self._backoff_seconds))
        self._backoff_seconds = min(most, 2 * wait)
        return wait

    def stopped(self, status: int | None) -> None:
        """Note the last end: it will not be started again."""
        self._let_go()
        if status is not None:
            self.last_exit = status
        self.phase = ProcessPhase.STOPPED

    def send(self, number: signal.Signals) -> None:
        """Send a signal to exactly this process; nothing when it has ended."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def state(self) -> ProcessState:
        """For `ps`."""
        return ProcessState(
            name=self.spec.name,
            phase=self.phase,
            pid=self.pid,
            restarts=self.restarts,
            last_exit=self.last_exit,
            warm=self.warm,
        )

    def _let_go(self) -> None:
        self.warm = False
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1
        self.pid = 0
