"""Start, memory, and what the processes cost while nothing happens."""

from __future__ import annotations

import time
from pathlib import Path

from bench.cluster import Cluster, running
from bench.figures import Report
from bench.phases import process_cpu_seconds
from pdctl.proc import descendants, resident_bytes

READY_SECONDS_MAX = 10.0
SMALL_BYTES_MAX = 70e6
ENGINE_BYTES_MAX = 1e9
IDLE_PERCENT_MAX = 1.0
IDLE_SECONDS = 10
LIMITED = {"router": SMALL_BYTES_MAX, "sidecar": SMALL_BYTES_MAX, "engine": ENGINE_BYTES_MAX}


def run(report: Report) -> None:
    """One `pdctl up` of the tiny GLM, looked at from outside."""
    with running("tiny-glm") as cluster:
        report.title("start: pdctl up, tiny-glm, 1 prefill + 1 decode, installed machine")
        for line in cluster.told.splitlines():
            if " s  " in line:
                report.line(f"  {line}")
        report.limit("ready after", cluster.ready_seconds, limit=READY_SECONDS_MAX, unit="s")
        report.line(f"  CPU until ready: {cluster.cpu_seconds:.1f} s over all processes")
        _processes(report, cluster)


def _processes(report: Report, cluster: Cluster) -> None:
    """Memory, and CPU over some idle seconds; a transfer process counts by itself."""
    pids = _named_pids(cluster)
    before = {name: process_cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(report.times(IDLE_SECONDS))
    seconds = time.monotonic() - began
    idle = {
        name: 100 * (process_cpu_seconds(pid) - before[name]) / seconds
        for name, pid in pids.items()
    }
    report.title(f"memory, and idle CPU over {seconds:.0f} s")
    report.table(
        ("process", "RSS MB", "PSS MB", "idle % of a core"),
        [
            (
                name,
                f"{resident_bytes(pid) / 1e6:.0f}",
                f"{_proportional_bytes(pid) / 1e6:.0f}",
                f"{idle[name]:.2f}",
            )
            for name, pid in pids.items()
        ],
    )
    for process in cluster.spec.processes:
        if process.kind in LIMITED:
            figure = resident_bytes(pids[process.name]) / 1e6
            limit = LIMITED[process.kind] / 1e6
            report.limit(f"memory of {process.name}", figure, limit=limit, unit="MB")
    busiest = max(idle, key=lambda name: idle[name])
    report.limit(
        f"busiest idle process ({busiest})", idle[busiest], limit=IDLE_PERCENT_MAX, unit="%"
    )


def _named_pids(cluster: Cluster) -> dict[str, int]:
    pids = {process.name: process.pid for process in cluster.state.processes}
    for process in cluster.spec.processes:
        if process.kind == "engine":
            for pid in descendants(pids[process.name])[1:]:
                pids[f"{process.name} transfer"] = pid
    return pids | {"supervisor": cluster.state.supervisor_pid}


def _proportional_bytes(pid: int) -> int:
    """Resident memory with each shared page divided by its sharers: forked engines share many."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
