"""The supervisor: the one parent of all processes of a local run.

    python -m pdctl.supervise --folder RUN_FOLDER

It restarts what ends, each process alone, as a kubelet would. It ends everything when told
(SIGTERM, `stop` over the control socket) and when its standard input ends before `detach` was said:
the other end of that pipe is held by `pdctl up`, so the run cannot outlive a `pdctl` that was
killed.

Nothing escapes: each process dies with its parent by the kernel's hand, the supervisor adopts what
its children leave behind (it is a child subreaper), and at the end it kills all that is still below
it before it removes the run folder and, last, its locks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from pdctl.child import Child
from pdctl.nursery_pipe import NurseryAnswer, NurseryPipe
from pdctl.proc import descendants
from pdctl.processes import (
    CONTROL_SOCKET,
    DETACH_LINE,
    LOGS_FOLDER,
    RUN_FILE,
    ProcessSpec,
    RunSpec,
    RunState,
)
from pdctl.run_folder import remove_base

_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES_MAX = 4096
_REQUEST_SECONDS = 5.0
_ENDING_SECONDS = 1.0
_ENDING_STEP_SECONDS = 0.02
_LOG_CHECK_SECONDS = 30.0
LOG_BYTES_MAX = 16 << 20
CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def log(event: str, **fields: object) -> None:
    """One JSON line on stderr, which is the supervisor's log file."""
    line = {"event": event, "level": "info", **fields}
    with contextlib.suppress(OSError):
        os.write(2, msgspec.json.encode(line) + b"\n")


class Supervisor:
    """Runs the processes of one `RunSpec` until it is told to stop."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._folder = Path(spec.folder)
        self._children = {process.name: Child(process) for process in spec.processes}
        self._popen: dict[int, subprocess.Popen[bytes]] = {}
        self._by_pid: dict[int, Child] = {}
        self._statuses: dict[int, int] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._nursery: NurseryPipe | None = None
        self._detached = False
        self._stop = asyncio.Event()
        self._stopping = False
        self._ended = asyncio.Event()
        """Set whenever a process has ended."""

    async def run(self) -> None:
        """Start everything, keep it running, end everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_reader(0, self._on_stdin)
        server = await asyncio.start_unix_server(
            self._on_request, self._folder / CONTROL_SOCKET, limit=_REQUEST_BYTES_MAX
        )
        # The nursery first: engines are forked from it.
        for child in sorted(self._children.values(), key=lambda c: c.spec.kind != "nursery"):
            self._start(child)
        while not await self._told_to_stop(_LOG_CHECK_SECONDS):
            bound_logs(self._folder / LOGS_FOLDER, LOG_BYTES_MAX)
        server.close()
        await self._end()

    async def _told_to_stop(self, seconds: float) -> bool:
        """Wait that long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    # --- starting ---------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        if self._stopping:
            return
        child.asked(time.monotonic())
        if child.spec.forked and self._fork(child):
            return
        self._execute(child)

    def _fork(self, child: Child) -> bool:
        return self._nursery is not None and self._nursery.fork(
            child, log=str(self._log_path(child.spec)), env=dict(CHILD_ENVIRONMENT)
        )

    def _execute(self, child: Child) -> None:
        is_nursery = child.spec.kind == "nursery"
        pipe = subprocess.PIPE if is_nursery else subprocess.DEVNULL
        environment = {
            **os.environ,
            **CHILD_ENVIRONMENT,
            "PDCLUSTER_PARENT_PID": str(os.getpid()),
            # Torch makes this folder at import, by default one in /tmp that outlives the run.
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "torch"),
        }
        with self._log_path(child.spec).open("ab") as log_file:
            try:
                popen = subprocess.Popen(
                    child.spec.argv,
                    stdin=pipe,
                    stdout=pipe if is_nursery else log_file,
                    stderr=log_file,
                    env=environment,
                )
            except OSError as error:
                log("process cannot be started", name=child.spec.name, error=str(error))
                self._schedule(child, None)
                return
        self._popen[popen.pid] = popen
        if is_nursery:
            self._open_nursery(child, popen)
        self._hold(child, popen.pid)

    def _open_nursery(self, child: Child, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdin is not None  # noqa: S101  # both are pipes, as `_execute` asked
        assert popen.stdout is not None  # noqa: S101
        # Duplicates, so that the pipe is closed by `NurseryPipe` and by nothing else.
        self._nursery = NurseryPipe(
            child, os.dup(popen.stdin.fileno()), os.dup(popen.stdout.fileno())
        )
        popen.stdin.close()
        popen.stdout.close()
        os.set_blocking(self._nursery.write_fd, False)
        os.set_blocking(self._nursery.read_fd, False)
        asyncio.get_running_loop().add_reader(self._nursery.read_fd, self._on_nursery)

    def _hold(self, child: Child, pid: int) -> None:
        """A pid is known: watch it, or note that it is gone already."""
        self._by_pid[pid] = child
        if not child.running(pid):
            self._schedule(child, self._statuses.pop(pid, None))
            return
        log("process runs", name=child.spec.name, pid=pid, restarts=child.restarts)
        asyncio.get_running_loop().add_reader(child.pidfd, self._on_exit, child)
        if self._stopping:
            child.send(signal.SIGKILL)

    def _log_path(self, spec: ProcessSpec) -> Path:
        return self._folder / LOGS_FOLDER / f"{spec.name.replace('/', '-')}.log"

    # --- what happens -----------------------------------------------------------------------

    def _on_stdin(self) -> None:
        said = os.read(0, 4096)
        asyncio.get_running_loop().remove_reader(0)
        self._detached = said == DETACH_LINE
        if not self._detached:
            log("the command that started this run ended")
            self._stop.set()

    def _on_nursery(self) -> None:
        nursery = self._nursery
        answers = nursery.read() if nursery is not None else None
        if nursery is None or answers is None:
            self._drop_nursery()
            return
        for answer in answers:
            self._on_answer(nursery, answer)

    def _on_answer(self, nursery: NurseryPipe, answer: NurseryAnswer) -> None:
        if answer.ready is not None:
            nursery.process.warm = True
        elif answer.pid is not None and nursery.waiting:
            self._hold(nursery.waiting.popleft(), answer.pid)
        elif answer.error is not None and nursery.waiting:
            child = nursery.waiting.popleft()
            log("the nursery refused", name=child.spec.name, error=answer.error)
            self._schedule(child, None)
        elif answer.exit is not None and answer.status is not None:
            self._note_status(answer.exit, answer.status)

    def _drop_nursery(self) -> None:
        """The nursery has ended: its children die with it, the ones asked for will not come."""
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return
        asyncio.get_running_loop().remove_reader(nursery.read_fd)
        nursery.close()
        while nursery.waiting:
            self._schedule(nursery.waiting.popleft(), None)

    def _on_exit(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        pid = child.pid
        self._reap()
        if child.spec.kind == "nursery":
            self._drop_nursery()
        status = self._statuses.pop(pid, None)
        log("process ended", name=child.spec.name, pid=pid, status=status)
        self._schedule(child, status)
        self._ended.set()

    def _schedule(self, child: Child, status: int | None) -> None:
        """Start it again after its backoff, unless everything is to end."""
        if self._stopping:
            child.stopped(status)
            return
        wait = child.ended(
            status,
            time.monotonic(),
            first=self._spec.backoff_seconds_min,
            most=self._spec.backoff_seconds_max,
            healthy=self._spec.healthy_after_seconds,
        )

        def again() -> None:
            self._timers.discard(timer)
            self._start(child)

        timer = asyncio.get_running_loop().call_later(wait, again)
        self._timers.add(timer)

    def _reap(self) -> None:
        """Collect every ended child of ours, adopted ones included."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                code = os.waitstatus_to_exitcode(status)
                popen = self._popen.pop(pid, None)
                if popen is not None:
                    popen.returncode = code
                self._note_status(pid, code)

    def _note_status(self, pid: int, status: int) -> None:
        """Remember how a process ended, in whichever order its end and its status are seen."""
        child = self._by_pid.pop(pid, None)
        if child is None:
            return
        if child.pid == pid:
            self._statuses[pid] = status
        else:
            child.last_exit = status

    # --- the control socket -----------------------------------------------------------------

    async def _on_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                answer = self._answer((await reader.readline()).strip())
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        writer.close()

    def _answer(self, line: bytes) -> object:
        match line:
            case b"ps":
                return RunState(
                    supervisor_pid=os.getpid(),
                    detached=self._detached,
                    processes=tuple(child.state() for child in self._children.values()),
                )
            case b"stop":
                self._stop.set()
                return {}
            case _:
                return {"error": "known requests are ps and stop"}

    # --- ending -----------------------------------------------------------------------------

    async def _end(self) -> None:
        """SIGTERM, a bounded wait, SIGKILL; then whatever is still below us."""
        self._stopping = True
        for timer in self._timers:
            timer.cancel()
        served = [c for c in self._children.values() if c.spec.kind != "nursery"]
        for child in served:
            child.send(signal.SIGTERM)
        await self._until_ended(served, self._spec.stop_seconds)
        self._drop_nursery()
        for child in self._children.values():
            child.send(signal.SIGKILL)
        await self._until_ended(list(self._children.values()), _ENDING_SECONDS)
        await self._end_descendants()

    async def _until_ended(self, children: list[Child], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(child.alive for child in children):
                    self._ended.clear()
                    await self._ended.wait()

    async def _end_descendants(self) -> None:
        deadline = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < deadline:
            self._reap()
            below = descendants(os.getpid())[1:]
            if not below:
                return
            for pid in below:
                # They are our descendants and not reaped, so their numbers are still theirs.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_ENDING_STEP_SECONDS)
        log("processes are left", pids=descendants(os.getpid())[1:])


def bound_logs(folder: Path, bytes_max: int) -> None:
    """Keep the newest half of what has grown too long; writers append, so they notice nothing.

    A line that is written between reading and cutting is lost, which a local run can bear.
    """
    for path in folder.glob("*.log"):
        size = path.stat().st_size
        if size <= bytes_max:
            continue
        with path.open("rb") as file:
            file.seek(size - bytes_max // 2)
            kept = file.read(bytes_max // 2).partition(b"\n")[2]
        os.truncate(path, 0)
        with path.open("ab") as file:
            file.write(kept)


def adopt_orphans() -> None:
    """Become the parent of what our children leave behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def clean_up(spec: RunSpec) -> None:
    """Remove the run folder, then the lock files; the locks themselves end with this process."""
    folder = Path(spec.folder)
    shutil.rmtree(folder, ignore_errors=True)
    for lock in spec.lock_files:
        Path(lock).unlink(missing_ok=True)
    remove_base(folder.parent)


def main() -> int:
    """Supervise the run whose folder is given until it is told to stop."""
    parser = argparse.ArgumentParser(prog="pdctl.supervise", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args().folder
    spec = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunSpec)
    adopt_orphans()
    try:
        asyncio.run(Supervisor(spec).run())
    finally:
        clean_up(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
