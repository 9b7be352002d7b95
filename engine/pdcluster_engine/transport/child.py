"""One life of the transfer process, seen from the engine: spawn, talk, kill, reap."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

import pdcluster_engine
import pdcluster_protocol
from pdcluster_engine.transport.causes import StderrTail, explain_exit
from pdcluster_engine.transport.channel import Channel
from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.process import FromProcess, ProcessSettings

KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
KEPT_PREFIXES = ("MC_", "COVERAGE_")
REAP_SECONDS = 10.0


class Child:
    """A started transfer process with its control channel and the end of its stderr."""

    __slots__ = ("_pidfd", "_popen", "_stderr_fd", "channel", "stderr")

    def __init__(
        self, popen: subprocess.Popen[bytes], channel: Channel[FromProcess], stderr_fd: int
    ) -> None:
        self._popen = popen
        self._stderr_fd = stderr_fd
        self.channel = channel
        self.stderr = StderrTail(stderr_fd)
        self._pidfd = os.pidfd_open(popen.pid)

    @classmethod
    def spawn(cls, settings: Settings, *, arena_fd: int, nbytes: int, address: int) -> Child:
        """Start the process; it takes a few milliseconds, `Started` comes over the channel.

        Raises:
            OSError: no process, descriptor or memory is left.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            argument = ProcessSettings(
                control_fd=theirs.fileno(),
                arena_fd=arena_fd,
                arena_nbytes=nbytes,
                arena_address=address,
                parent_pid=os.getpid(),
                adapter=settings,
            )
            try:
                popen = _start(argument, pass_fds=(theirs.fileno(), arena_fd))
            except OSError:
                ours.close()
                raise
        stderr_fd = -1
        try:
            stderr_fd = _detached_stderr(popen)
            return cls(popen, Channel(ours, FromProcess), stderr_fd)
        except OSError:
            # No descriptor was left. Nobody would look after it, so it must not be.
            popen.kill()
            popen.wait()
            ours.close()
            if stderr_fd >= 0:
                os.close(stderr_fd)
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def stderr_fd(self) -> int:
        """The descriptor of the pipe that `stderr` reads."""
        return self._stderr_fd

    @property
    def end_fd(self) -> int:
        """A pidfd: readable once the process has ended."""
        return self._pidfd

    @property
    def end_seconds(self) -> float | None:
        """A killed process ends; there is nothing to wait for with a clock."""
        return None

    def kill(self) -> None:
        """Send SIGKILL; `reaped` says when its memory is gone."""
        self._popen.kill()

    def reaped(self) -> bool:
        """Whether the process has ended, with every thread and mapping, and was reaped."""
        return self._popen.poll() is not None

    def explain(self) -> str:
        """How a reaped process ended, with what its stderr says about it."""
        code = self._popen.returncode or 0
        how = explain_exit(code)
        if code == -signal.SIGKILL:
            # Somebody else ended it, so its last line explains nothing.
            return how
        self.stderr.drain()
        said = self.stderr.last_line()
        return f"{how}; it said: {said}" if said else how

    def close(self) -> None:
        """Kill the process if it lives, reap it, and release the descriptors."""
        self._popen.kill()
        self._popen.wait(REAP_SECONDS)
        self.release()

    def release(self) -> None:
        """Release the descriptors; the process sees the end of its channel."""
        self.channel.close()
        os.close(self._stderr_fd)
        os.close(self._pidfd)


def _start(argument: ProcessSettings, *, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pdcluster_engine.transport.process",
        msgspec.json.encode(argument).decode(),
    ]
    # Its own process group: a Ctrl-C in the terminal must not end it before the engine drains.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        env=_environment(),
        process_group=0,
    )


def _detached_stderr(popen: subprocess.Popen[bytes]) -> int:
    """A descriptor of its log that no reader of Python holds a buffer for."""
    if popen.stderr is None:
        raise OSError("the transfer process has no stderr")
    with popen.stderr:
        return os.dup(popen.stderr.fileno())


def _environment() -> dict[str, str]:
    """A small environment: nothing secret, and our packages where this process found them."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_ENVIRONMENT or name.startswith(KEPT_PREFIXES)
    }
    roots = [_root(pdcluster_engine.__file__), _root(pdcluster_protocol.__file__)]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(roots))
    kept["OMP_NUM_THREADS"] = "1"
    return kept


def _root(module_file: str | None) -> str:
    return str(Path(module_file or ".").resolve().parents[1])
