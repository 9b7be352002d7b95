"""Where an engine's fault plan comes from, and how loudly it says so.

A transport that lies must never be on unnoticed: the plan stands in `/server_info`, every plan is
logged as an error, and each injected fault is counted in `/metrics`.
"""

from __future__ import annotations

from pathlib import Path

import structlog
from prometheus_client import Counter

from pdcluster_engine.transport.faulty import FaultyTransport, Injected
from pdcluster_engine.transport.port import Transport
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.fault_plan import (
    FILE_MARK,
    TEXT_LENGTH_MAX,
    Fault,
    FaultPlan,
    parse_fault_plan,
)

log = structlog.get_logger()

FIELD = "faults"


class FaultFile:
    """A file with a plan, which tests replace while the engine runs."""

    __slots__ = ("_path", "_seen")

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] | None = None

    def read(self) -> FaultPlan:
        """The plan in it.

        Raises:
            ConfigError: it cannot be read or is no plan.
        """
        try:
            self._seen = self._version()
            with self._path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(TEXT_LENGTH_MAX + 1)
        except OSError as error:
            raise ConfigError(f"{FIELD}: {self._path} cannot be read: {error.strerror}") from error
        return parse_fault_plan(text, field=f"{FIELD}: {self._path}")

    def renewed(self) -> FaultPlan | None:
        """The plan, if the file was replaced since it was read.

        Raises:
            ConfigError: what replaced it is no plan.
        """
        try:
            if self._version() == self._seen:
                return None
        except OSError as error:
            raise ConfigError(f"{FIELD}: {self._path} is gone: {error.strerror}") from error
        return _announce(self.read())

    def _version(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_ino, status.st_mtime_ns


def inject_faults(
    inner: Transport, faults: str, *, arena_fd: int, arena_nbytes: int, counter: Counter
) -> FaultyTransport:
    """`inner` with the faults of a plan, or of the file named after `@`.

    `counter` has one label, the fault; its series exist from now on.

    Raises:
        ConfigError: there is no such plan.
    """
    file = FaultFile(faults.removeprefix(FILE_MARK)) if faults.startswith(FILE_MARK) else None
    plan = parse_fault_plan(faults, field=FIELD) if file is None else file.read()
    _announce(plan)
    for fault in Fault:
        counter.labels(fault)

    def count(injected: Injected) -> None:
        counter.labels(injected.fault).inc()

    return FaultyTransport(
        inner,
        plan,
        arena_fd=arena_fd,
        arena_nbytes=arena_nbytes,
        told=count,
        renewed=(lambda: None) if file is None else file.renewed,
    )


def _announce(plan: FaultPlan) -> FaultPlan:
    log.error(
        "transport_faults_on_purpose",
        seed=plan.seed,
        shares={str(fault): share for fault, share in plan.shares.items()},
        late_seconds=plan.late_seconds,
    )
    return plan
