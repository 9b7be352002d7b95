"""What `up` tells the supervisor to run, and what the supervisor tells about it.

`run.json` in the run folder is a `RunSpec`. Over the control socket one line is one request: `ps`
is answered with a `RunState` as one line of JSON, `stop` with `{}` before everything ends.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

RUN_FILE = "run.json"
CONTROL_SOCKET = "control"
LOGS_FOLDER = "logs"
DETACH_LINE = b"detach\n"

Kind = Literal["nursery", "engine", "sidecar", "router"]


class ProcessPhase(StrEnum):
    """Where the supervisor is with one process."""

    STARTING = "starting"
    """Asked for, no pid yet."""
    RUNNING = "running"
    BACKOFF = "backoff"
    """It ended and will be started again."""
    STOPPED = "stopped"


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process: how it is started and how a table shows it."""

    name: str
    kind: Kind
    argv: tuple[str, ...]
    """For an engine with `forked`, what is run when the nursery cannot fork it."""
    forked: bool = False
    """Started by the nursery's fork from `config`."""
    config: str = ""
    instance: str = ""
    role: str = ""
    ranks: str = ""
    ports: tuple[str, ...] = ()
    listen_url: str = ""
    """Answers 200 as soon as the process listens."""
    ready_url: str = ""
    """Answers 200 when the process serves: a sidecar when all its ranks have joined."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One local run; written once by `up`."""

    cluster: str
    folder: str
    lock_files: tuple[str, ...] = ()
    """Removed at the end, as the last step."""
    endpoint: str = ""
    admin: str = ""
    served_name: str = ""
    processes: tuple[ProcessSpec, ...]
    backoff_seconds_min: float = 0.2
    backoff_seconds_max: float = 5.0
    healthy_after_seconds: float = 10.0
    """A process that ran so long starts again without having to wait."""
    stop_seconds: float = 3.0
    """From SIGTERM to SIGKILL."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process now."""

    name: str
    phase: ProcessPhase
    pid: int = 0
    restarts: int = 0
    last_exit: int | None = None
    """Of its last end; negative is a signal."""
    warm: bool = False
    """Of the nursery: it has imported everything and forks in milliseconds."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `ps`."""

    supervisor_pid: int
    detached: bool
    processes: tuple[ProcessState, ...]
