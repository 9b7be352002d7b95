"""Every process of a run by name, found as `pdctl ps` finds them: those told to the supervisor,
and below each engine its transfer processes.

A name outlives the process: the supervisor starts another one under it, and an engine starts
another transfer process, so `prefill-0/engine-0/transfer` always means the one that works now.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdctl.proc import descendants
from support.cluster import PairCluster


class Kind(StrEnum):
    """What a process is."""

    ROUTER = "router"
    SIDECAR = "sidecar"
    ENGINE = "engine"
    TRANSFER = "transfer"
    NURSERY = "nursery"
    SUPERVISOR = "supervisor"


MORTAL = (Kind.ROUTER, Kind.SIDECAR, Kind.ENGINE, Kind.TRANSFER)
"""What is killed. The other two exist on one machine only, and the engines end with them."""


class Process(msgspec.Struct, frozen=True):
    """One process now; pid 0 while there is none."""

    name: str
    kind: Kind
    pid: int


def processes(cluster: PairCluster) -> list[Process]:
    """All processes of a run in the order in which they were started."""
    kinds = {spec.name: Kind(spec.kind) for spec in cluster.run.processes}
    state = cluster.state()
    found = [Process("supervisor", Kind.SUPERVISOR, state.supervisor_pid)]
    for known in state.processes:
        found.append(Process(known.name, kinds[known.name], known.pid))
        if kinds[known.name] is Kind.ENGINE:
            below = descendants(known.pid)[1:] if known.pid else []
            found += _transfers(known.name, below)
    return found


def _transfers(engine: str, pids: list[int]) -> list[Process]:
    """Its transfer processes, one for each emulated rank; at least a name for the one to come."""
    names = [f"{engine}/transfer"] + [f"{engine}/transfer-{n}" for n in range(1, len(pids))]
    return [Process(name, Kind.TRANSFER, pid) for name, pid in zip(names, pids or [0], strict=True)]


def mortals(cluster: PairCluster) -> list[Process]:
    """Those that may be killed."""
    return [process for process in processes(cluster) if process.kind in MORTAL]


def find(cluster: PairCluster, name: str) -> Process:
    """The process of this name.

    Raises:
        LookupError: there is none now.
    """
    for process in processes(cluster):
        if process.name == name:
            return process
    raise LookupError(name)
