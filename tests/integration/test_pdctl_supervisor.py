"""The supervisor over real processes: restarts, ends, and what is left when it is killed itself.

The processes are small scripts that, like the real ones, die with their parent.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdctl.proc import descendants
from pdctl.processes import Kind, ProcessSpec, RunSpec, RunState
from pdctl.run_folder import sweep
from support.tied_scripts import FAILS, IGNORES_SIGTERM, LEAVES_AN_ORPHAN, NURSERY, WAITS

DEADLINE_SECONDS = 20.0


def process(name: str, script: str, *arguments: str, kind: Kind = "sidecar") -> ProcessSpec:
    return ProcessSpec(name=name, kind=kind, argv=(sys.executable, "-c", script, *arguments))


def engine(name: str, *, config: str = "x", fallback: str = WAITS) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        kind="engine",
        argv=(sys.executable, "-c", fallback),
        forked=True,
        config=config,
    )


class Run:
    """One supervisor in a base folder of its own."""

    def __init__(
        self,
        base: Path,
        processes: tuple[ProcessSpec, ...],
        *,
        stop_seconds: float = 3.0,
        backoff_seconds_min: float = 0.2,
        backoff_seconds_max: float = 5.0,
    ) -> None:
        self.folder = base / "slot-1"
        (self.folder / "logs").mkdir(parents=True)
        self.lock = base / "slot-1.lock"
        self._lock_descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX)
        spec = RunSpec(
            cluster="test",
            folder=str(self.folder),
            lock_files=(str(self.lock),),
            processes=processes,
            stop_seconds=stop_seconds,
            backoff_seconds_min=backoff_seconds_min,
            backoff_seconds_max=backoff_seconds_max,
        )
        (self.folder / "run.json").write_bytes(msgspec.json.encode(spec))
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "pdctl.supervise", "--folder", str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[self._lock_descriptor],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        os.close(self._lock_descriptor)

    def ask(self, word: bytes) -> Any:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(DEADLINE_SECONDS)
            client.connect(str(self.folder / "control"))
            client.sendall(word + b"\n")
            with client.makefile("rb") as stream:
                return json.loads(stream.readline())

    def state(self) -> RunState | None:
        try:
            return msgspec.convert(self.ask(b"ps"), RunState)
        except (OSError, ValueError):
            return None

    def until(self, condition: Callable[[RunState], bool]) -> RunState:
        """Ask again and again until the state is as wished."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        state = None
        while time.monotonic() < deadline:
            state = self.state()
            if state is not None and condition(state):
                return state
            # Wakes early when the supervisor ends, which no condition can then meet.
            select.select([self.pidfd], [], [], 0.03)
        raise AssertionError(f"not reached: {state}")

    @property
    def pidfd(self) -> int:
        if not hasattr(self, "_pidfd"):
            self._pidfd = os.pidfd_open(self.popen.pid)
        return self._pidfd

    def running(self) -> RunState:
        return self.until(lambda state: all(p.phase == "running" for p in state.processes))

    def pids(self) -> list[int]:
        return descendants(self.popen.pid)[1:]

    def wait(self) -> float:
        """The seconds until the supervisor has ended."""
        started = time.monotonic()
        self.popen.wait(DEADLINE_SECONDS)
        return time.monotonic() - started

    def close(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(DEADLINE_SECONDS)
        finally:
            self.popen.kill()
            self.popen.wait(DEADLINE_SECONDS)
            os.close(self.pidfd)


Start = Callable[..., Run]


@pytest.fixture
def start() -> Iterator[Start]:
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:

        def begin(*processes: ProcessSpec, **settings: float) -> Run:
            run = Run(Path(folder) / "base", processes, **settings)
            runs.append(run)
            return run

        try:
            yield begin
        finally:
            for run in runs:
                run.close()


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0], pid
        os.close(pidfd)


def pid_of(state: RunState, name: str) -> int:
    return next(p.pid for p in state.processes if p.name == name)


def assert_nothing_left(run: Run, pids: list[int]) -> None:
    until_gone(pids)
    assert not run.folder.parent.exists()


def test_a_dead_process_is_restarted_alone(start: Start) -> None:
    run = start(process("a", WAITS), process("b", WAITS))
    before = run.running()

    os.kill(pid_of(before, "a"), signal.SIGKILL)
    after = run.until(lambda s: s.processes[0].restarts == 1 and s.processes[0].phase == "running")

    assert -9 == after.processes[0].last_exit
    assert pid_of(before, "a") != pid_of(after, "a")
    assert (pid_of(before, "b"), 0) == (pid_of(after, "b"), after.processes[1].restarts)


def test_a_process_that_keeps_failing_waits_longer_each_time(start: Start) -> None:
    run = start(process("a", FAILS), backoff_seconds_min=0.05, backoff_seconds_max=0.2)

    started = time.monotonic()
    state = run.until(lambda s: s.processes[0].restarts >= 4)

    assert 2 == state.processes[0].last_exit
    assert time.monotonic() - started >= 0.05 + 0.1 + 0.2
    assert "the port is busy" in (run.folder / "logs/a.log").read_text()


def test_a_program_that_cannot_be_started_is_tried_again(start: Start) -> None:
    run = start(
        ProcessSpec(name="a", kind="sidecar", argv=("/nonexistent/program",)), process("b", WAITS)
    )

    state = run.until(lambda s: s.processes[0].restarts >= 1 and s.processes[1].pid != 0)

    assert state.processes[0].last_exit is None


def test_stop_ends_everything_and_leaves_nothing(start: Start) -> None:
    run = start(process("n", NURSERY, kind="nursery"), engine("e"), process("a", WAITS))
    run.running()
    pids = run.pids()

    assert {} == run.ask(b"stop")

    assert run.wait() < 3.0
    assert 0 == run.popen.returncode
    assert_nothing_left(run, pids)


def test_sigterm_ends_everything(start: Start) -> None:
    run = start(process("a", WAITS))
    run.running()
    pids = run.pids()

    run.popen.terminate()

    assert run.wait() < 3.0
    assert_nothing_left(run, pids)


def test_the_end_of_the_pipe_ends_everything(start: Start) -> None:
    """What happens when the foreground command is killed."""
    run = start(process("a", WAITS), process("b", WAITS))
    run.running()
    pids = run.pids()

    assert run.popen.stdin is not None
    run.popen.stdin.close()

    assert run.wait() < 3.0
    assert_nothing_left(run, pids)


def test_a_detached_run_outlives_the_pipe(start: Start) -> None:
    run = start(process("a", WAITS))
    run.running()

    assert run.popen.stdin is not None
    run.popen.stdin.write(b"detach\n")
    run.popen.stdin.close()

    assert run.until(lambda state: state.detached).processes[0].phase == "running"
    run.ask(b"stop")
    run.wait()


def test_what_ignores_sigterm_is_killed_in_time(start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = start(process("a", IGNORES_SIGTERM, str(mark)), stop_seconds=0.3)
    run.until(lambda _state: mark.exists())
    pids = run.pids()

    run.ask(b"stop")

    assert 0.2 < run.wait() < 3.0
    assert_nothing_left(run, pids)


def test_an_orphan_in_a_session_of_its_own_is_killed_too(start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = start(process("a", LEAVES_AN_ORPHAN, str(mark)), stop_seconds=0.3)
    run.until(lambda _state: mark.exists() and mark.read_text() != "")
    orphan = int(mark.read_text())
    os.kill(pid_of(run.running(), "a"), signal.SIGKILL)
    run.until(lambda s: s.processes[0].restarts == 1 and s.processes[0].phase == "running")
    assert orphan in run.pids()

    run.ask(b"stop")
    run.wait()

    until_gone([orphan])


def test_a_killed_supervisor_takes_its_processes_along_and_is_swept(start: Start) -> None:
    run = start(process("n", NURSERY, kind="nursery"), engine("e"), process("a", WAITS))
    run.running()
    pids = run.pids()
    assert 3 == len(pids)
    assert [] == sweep(run.folder.parent)

    run.popen.kill()
    run.wait()

    until_gone(pids)
    assert [run.folder] == sweep(run.folder.parent)
    assert [] == list(run.folder.parent.iterdir())


def test_an_engine_is_forked_by_the_nursery(start: Start) -> None:
    run = start(process("n", NURSERY, kind="nursery"), engine("e"))

    state = run.running()

    assert pid_of(state, "e") in descendants(pid_of(state, "n"))


def test_a_forked_engine_that_dies_is_forked_again_with_its_status_told(start: Start) -> None:
    run = start(process("n", NURSERY, kind="nursery"), engine("e"))
    first = run.running()

    os.kill(pid_of(first, "e"), signal.SIGKILL)
    state = run.until(
        lambda s: s.processes[1].phase == "running" and s.processes[1].last_exit is not None
    )

    assert (1, -9) == (state.processes[1].restarts, state.processes[1].last_exit)
    assert pid_of(state, "e") in descendants(pid_of(state, "n"))


def test_when_the_nursery_dies_engines_come_back_without_it(start: Start) -> None:
    run = start(
        process("n", NURSERY, kind="nursery"),
        engine("e"),
        backoff_seconds_min=0.05,
        backoff_seconds_max=0.1,
    )
    first = run.running()

    os.kill(pid_of(first, "n"), signal.SIGKILL)
    state = run.until(lambda s: all(p.restarts >= 1 and p.phase == "running" for p in s.processes))

    until_gone([pid_of(first, "e")])
    assert pid_of(first, "e") != pid_of(state, "e")


def test_what_the_nursery_refuses_is_asked_again(start: Start) -> None:
    run = start(process("n", NURSERY, kind="nursery"), engine("e", config="refused"))

    state = run.until(lambda s: s.processes[1].restarts >= 2)

    assert 0 == state.processes[1].pid


def test_an_unknown_request_is_answered(start: Start) -> None:
    run = start(process("a", WAITS))
    run.running()

    assert {"error": "known requests are ps and stop"} == run.ask(b"dance")
