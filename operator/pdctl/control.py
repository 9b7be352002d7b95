"""Finding the runs of this user, and talking to their supervisors."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

import msgspec

from pdcluster_protocol.errors import ConfigError, PDClusterError, Reason
from pdctl.processes import CONTROL_SOCKET, RUN_FILE, RunSpec, RunState
from pdctl.run_folder import base_folder, remove_base, run_folders, sweep

ANSWER_SECONDS = 5.0
ANSWER_BYTES_MAX = 4 << 20


class Run(msgspec.Struct, frozen=True):
    """A living local run."""

    spec: RunSpec
    state: RunState


def runs() -> list[Run]:
    """All living runs; what dead ones left is swept away first."""
    base = base_folder()
    sweep(base)
    found = []
    for folder in run_folders(base):
        # A run that is starting or ending has no socket, or no folder any more.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            spec = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunSpec)
            found.append(Run(spec, ask_state(folder)))
    remove_base(base)
    return found


def find_run(name: str | None) -> Run:
    """The run of this name, or the only one.

    Raises:
        ConfigError: there is none, or several and no name.
    """
    found = [run for run in runs() if name is None or run.spec.cluster == name]
    if not found:
        wanted = "" if name is None else f" named {name!r}"
        raise ConfigError(f"no cluster{wanted} runs here; start one with pdctl up -f FILE")
    if len(found) > 1:
        names = ", ".join(run.spec.cluster for run in found)
        raise ConfigError(f"{len(found)} clusters run here ({names}); choose with --name")
    return found[0]


def ask_state(folder: Path) -> RunState:
    """The supervisor's `ps`.

    Raises:
        OSError: nobody listens.
        msgspec.MsgspecError: the answer is none.
    """
    return msgspec.json.decode(_ask(folder, b"ps"), type=RunState)


def stop(run: Run, *, deadline_seconds: float) -> None:
    """Tell a run to end and wait until its supervisor has ended.

    Raises:
        PDClusterError: it did not in time.
    """
    pid = run.state.supervisor_pid
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(OSError):
            _ask(Path(run.spec.folder), b"stop")
        if not select.select([pidfd], [], [], deadline_seconds)[0]:
            raise PDClusterError(
                f"supervisor {pid} of {run.spec.cluster} did not end within {deadline_seconds:.0f}"
                " s; end it with kill -9, everything below it ends with it",
                reason=Reason.DEADLINE_EXCEEDED,
            )
    finally:
        os.close(pidfd)


def _ask(folder: Path, word: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_SECONDS)
        client.connect(str(folder / CONTROL_SOCKET))
        client.sendall(word + b"\n")
        with client.makefile("rb") as answer:
            return answer.readline(ANSWER_BYTES_MAX)
