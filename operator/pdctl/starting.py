"""Watching a run become ready: what serves, what failed, and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdcluster_protocol.errors import ConfigError, PDClusterError, Reason
from pdctl.control import ask_state
from pdctl.processes import LOGS_FOLDER, ProcessSpec, RunSpec, RunState
from pdctl.supervision import Supervision
from pdctl.web import Unreachable, exchange

POLL_SECONDS = 0.1
PROBE_SECONDS = 1.0
ENDS_MAX = 3
"""A process that ended so often while starting will not come up."""
EXIT_CONFIG = 2
LOG_TAIL_BYTES = 64 << 10

Tell = Callable[[str], None]


def wait_until_ready(
    spec: RunSpec, supervision: Supervision, *, deadline_seconds: float, tell: Tell
) -> RunState:
    """Poll until every process serves; `tell` gets one line as each begins to.

    Raises:
        ConfigError: a process refused its configuration.
        PDClusterError: a process or the supervisor keeps ending, or the time ran out.
    """
    started = time.monotonic()
    waiting = {process.name: process for process in spec.processes if process.ready_url}
    while True:
        state = _state(spec, supervision)
        if state is not None:
            _require_progress(spec, state)
            for process in list(waiting.values()):
                if _serves(process):
                    del waiting[process.name]
                    tell(f"{time.monotonic() - started:5.1f} s  {_title(process)} is ready")
            if not waiting:
                return state
        if time.monotonic() - started > deadline_seconds:
            raise PDClusterError(
                f"not ready after {deadline_seconds:.0f} s (spec.timeouts.startupSeconds):"
                f" {', '.join(waiting)}",
                reason=Reason.NOT_READY,
            )
        supervision.wait(POLL_SECONDS)


def last_words(folder: Path, name: str) -> str:
    """The last line that a process wrote, with the message of a JSON line taken out."""
    path = folder / LOGS_FOLDER / f"{name.replace('/', '-')}.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return "it wrote no log"
    if not lines:
        return "it wrote nothing"
    try:
        fields = msgspec.json.decode(lines[-1], type=dict[str, object])
    except msgspec.MsgspecError:
        return lines[-1]
    words = [str(fields[key]) for key in ("event", "reason", "detail", "error") if fields.get(key)]
    return ": ".join(words) or lines[-1]


def _state(spec: RunSpec, supervision: Supervision) -> RunState | None:
    """The supervisor's state; None while it is not listening yet."""
    if supervision.ended:
        raise PDClusterError(
            f"the supervisor ended with {supervision.exit_code}: "
            f"{supervision.last_words or 'it wrote nothing'}",
            reason=Reason.NOT_READY,
        )
    try:
        return ask_state(Path(spec.folder))
    except (OSError, msgspec.MsgspecError):
        return None


def _require_progress(spec: RunSpec, state: RunState) -> None:
    for process in state.processes:
        if process.last_exit == EXIT_CONFIG:
            raise ConfigError(f"{process.name}: {last_words(Path(spec.folder), process.name)}")
        if process.restarts >= ENDS_MAX:
            raise PDClusterError(
                f"{process.name} ended {process.restarts} times while starting, last with"
                f" {process.last_exit}: {last_words(Path(spec.folder), process.name)}",
                reason=Reason.NOT_READY,
            )


def _serves(process: ProcessSpec) -> bool:
    try:
        answer = exchange("GET", process.ready_url, timeout_seconds=PROBE_SECONDS)
    except Unreachable:
        return False
    return answer.status == 200


def _title(process: ProcessSpec) -> str:
    parts = [process.kind, process.instance, process.ranks]
    return " ".join(part for part in parts if part)
