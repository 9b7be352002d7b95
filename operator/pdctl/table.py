"""The table of processes that `up` and `ps` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdctl.proc import descendants, resident_bytes
from pdctl.processes import ProcessPhase, ProcessSpec, ProcessState, RunSpec, RunState

COLUMNS = ("ROLE", "INSTANCE", "PROCESS", "RANKS", "PORTS", "PID", "MEMORY", "STATE")


def process_table(spec: RunSpec, state: RunState) -> str:
    """One line per process; below an engine the transfer process that moves its bytes."""
    states = {process.name: process for process in state.processes}
    rows: list[tuple[str, ...]] = [COLUMNS]
    for process in spec.processes:
        known = states.get(process.name)
        if known is not None:
            rows.extend(_rows(process, known))
    rows.append(
        ("", "", "supervisor", "", "", str(state.supervisor_pid), _memory(state.supervisor_pid), "")
    )
    return aligned(rows)


def aligned(rows: Iterable[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell."""
    lines = list(rows)
    widths = [max(len(row[column]) for row in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )


def _rows(spec: ProcessSpec, state: ProcessState) -> Iterator[tuple[str, ...]]:
    ports = spec.ports[:1] if spec.kind == "engine" else spec.ports
    yield (
        spec.role,
        spec.instance,
        spec.kind,
        spec.ranks,
        " ".join(ports),
        str(state.pid or ""),
        _memory(state.pid),
        _phase(state),
    )
    if spec.kind != "engine" or not state.pid:
        return
    for pid in descendants(state.pid)[1:]:
        yield ("", "", "transfer", "", " ".join(spec.ports[1:]), str(pid), _memory(pid), "")


def _phase(state: ProcessState) -> str:
    text = str(state.phase)
    if state.restarts:
        text += f", {state.restarts} restarts"
        if state.last_exit is not None:
            text += f", last exit {state.last_exit}"
    elif state.phase is ProcessPhase.BACKOFF:
        text += f", exit {state.last_exit}"
    return text


def _memory(pid: int) -> str:
    return f"{resident_bytes(pid) / 1e6:.0f} MB" if pid else ""
