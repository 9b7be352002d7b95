"""The foreground command's hold on its supervisor: a process, a pipe, and a bounded end."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys

from pdctl.prepare import Prepared
from pdctl.processes import DETACH_LINE
from pdctl.run_folder import sweep

END_SECONDS = 4.5
"""After that the supervisor is killed; its processes die with it by the kernel's hand."""
KILL_SECONDS = 1.0
WORDS_BYTES_MAX = 4096


class Supervision:
    """Starts the supervisor of a prepared run and ends it; a context manager.

    Leaving the context ends the run, unless `detach` was called.
    """

    __slots__ = ("_base", "_detached", "_pidfd", "_process", "_words")

    def __init__(self, prepared: Prepared) -> None:
        self._base = prepared.folder.parent
        self._words = prepared.folder / "logs" / "supervisor.log"
        with self._words.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdctl.supervise", "--folder", str(prepared.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for us alone; we tell the supervisor by the pipe.
                start_new_session=True,
                pass_fds=[fd for claim in prepared.claims for fd in claim.descriptors],
            )
        for claim in prepared.claims:
            claim.let_go_here()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._detached = False

    def __enter__(self) -> Supervision:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.end()
        os.close(self._pidfd)

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the supervisor has ended by itself."""
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """How it ended; negative is a signal."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The last line of its log, if that is still there."""
        with contextlib.suppress(OSError):
            lines = self._words.read_text(errors="replace")[-WORDS_BYTES_MAX:].strip().splitlines()
            return lines[-1] if lines else ""
        return ""

    def wait(self, seconds: float | None) -> bool:
        """Wait until the supervisor ends or the time is over; whether it ended."""
        return bool(select.select([self._pidfd], [], [], seconds)[0])

    def detach(self) -> None:
        """Let go: the run goes on without us."""
        assert self._process.stdin is not None  # noqa: S101  # a pipe, as asked above
        self._process.stdin.write(DETACH_LINE)
        self._process.stdin.close()
        self._detached = True
        # It is not ours to wait for any more, and it is meant to outlive us.
        self._process.returncode = 0

    def end(self) -> None:
        """Close the pipe, wait, and kill what does not end; then nothing is left."""
        assert self._process.stdin is not None  # noqa: S101  # a pipe, as asked above
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self.wait(END_SECONDS):
            self._process.kill()
        self._process.wait(KILL_SECONDS)
        if self._base.is_dir():
            sweep(self._base)
