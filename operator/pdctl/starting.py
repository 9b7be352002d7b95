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
    """Poll until every process serves; `tell` gets one line for each step.

    Raises:
        ConfigError: a process refused its configuration.
        PDClusterError: a process or the supervisor keeps ending, or the time ran out.
    """
    started = time.monotonic()
    steps = _steps(spec)
    while True:
        state = _state(spec, supervision)
        if state is not None:
            _require_progress(spec, state)
            done = [step for step in steps if step.reached(state)]
            for step in done:
                tell(f"{time.monotonic() - started:5.1f} s  {step.text}")
            steps = [step for step in steps if step not in done]
            if not steps:
                return state
        if time.monotonic() - started > deadline_seconds:
            raise PDClusterError(
                f"not ready after {deadline_seconds:.0f} s (spec.timeouts.startupSeconds); missing:"
                f" {', '.join(step.text for step in steps)}",
                reason=Reason.NOT_READY,
            )
        supervision.wait(POLL_SECONDS)


class Step(msgspec.Struct, frozen=True):
    """One thing that start-up waits for; the nursery's has no URL."""

    text: str
    url: str

    def reached(self, state: RunState) -> bool:
        """Whether it has come."""
        if not self.url:
            return any(process.warm for process in state.processes)
        try:
            return exchange("GET", self.url, timeout_seconds=PROBE_SECONDS).status == 200
        except Unreachable:
            return False


def _steps(spec: RunSpec) -> list[Step]:
    """All steps, in the order in which they usually come."""
    listens = [
        Step(f"{process.kind} {process.instance} listens", process.listen_url)
        for process in spec.processes
        if process.listen_url
    ]
    warm = [Step("nursery is warm", "") for p in spec.processes if p.kind == "nursery"]
    order = {"engine": 0, "sidecar": 1, "router": 2}
    serving = [process for process in spec.processes if process.ready_url]
    serving.sort(key=lambda process: order.get(process.kind, 0))
    return [*listens, *warm, *(Step(_ready_text(p), p.ready_url) for p in serving)]


def _ready_text(process: ProcessSpec) -> str:
    match process.kind:
        case "sidecar":
            which = process.name.removeprefix(f"{process.instance}/sidecar").replace("-", " pod ")
            return f"{process.role} {process.instance}{which} is ready: all ranks have joined"
        case "router":
            return f"router {process.instance} is ready: it has a pair"
        case _:
            return f"{process.kind} {process.instance} {process.ranks} serves".replace("  ", " ")


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
