"""`pdctl ps --json`: what the table shows, for programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdctl.control import Run
from pdctl.proc import descendants, resident_bytes
from pdctl.processes import ProcessPhase, ProcessSpec, ProcessState


class Transfer(msgspec.Struct, frozen=True):
    """A transfer process below an engine."""

    pid: int
    memory_bytes: int


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run now; pid 0 while there is none."""

    name: str
    kind: str
    instance: str
    role: str
    ranks: str
    ports: tuple[str, ...]
    pid: int
    memory_bytes: int
    phase: ProcessPhase
    restarts: int
    last_exit: int | None
    transfers: tuple[Transfer, ...]


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    cluster: str
    endpoint: str
    admin: str
    folder: str
    supervisor_pid: int
    detached: bool
    processes: tuple[Process, ...]


def listing(runs: Sequence[Run]) -> str:
    """All runs as indented JSON."""
    encoded = msgspec.json.encode([_listed(run) for run in runs])
    return msgspec.json.format(encoded, indent=2).decode()


def _listed(run: Run) -> Listing:
    states = {state.name: state for state in run.state.processes}
    return Listing(
        cluster=run.spec.cluster,
        endpoint=run.spec.endpoint,
        admin=run.spec.admin,
        folder=run.spec.folder,
        supervisor_pid=run.state.supervisor_pid,
        detached=run.state.detached,
        processes=tuple(
            _process(spec, states[spec.name]) for spec in run.spec.processes if spec.name in states
        ),
    )


def _process(spec: ProcessSpec, state: ProcessState) -> Process:
    below = descendants(state.pid)[1:] if spec.kind == "engine" and state.pid else []
    return Process(
        name=spec.name,
        kind=spec.kind,
        instance=spec.instance,
        role=spec.role,
        ranks=spec.ranks,
        ports=spec.ports,
        pid=state.pid,
        memory_bytes=resident_bytes(state.pid) if state.pid else 0,
        phase=state.phase,
        restarts=state.restarts,
        last_exit=state.last_exit,
        transfers=tuple(Transfer(pid, resident_bytes(pid)) for pid in below),
    )
