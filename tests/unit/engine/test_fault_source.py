"""A plan comes from a text or a file, and whoever looks sees that it is on."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from pdcluster_engine.telemetry import Telemetry
from pdcluster_engine.transport.fault_source import FaultFile, inject_faults
from pdcluster_engine.transport.local import LocalTransport
from pdcluster_engine.transport.port import Deadlines, Ready
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.fault_plan import Fault, FaultPlan
from support.arenas import Side, memfd

NBYTES = 4096


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def test_a_file_is_read_again_when_it_was_replaced_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    replace(path, "seed=1")
    file = FaultFile(str(path))
    assert FaultPlan(1, {}) == file.read()
    assert file.renewed() is None

    replace(path, "seed=2,Drop=1")
    assert FaultPlan(2, {Fault.DROP: 1.0}) == file.renewed()
    assert file.renewed() is None


def test_a_file_that_is_missing_or_no_plan_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    with pytest.raises(ConfigError, match=f"{path} cannot be read: No such file"):
        FaultFile(str(path)).read()
    replace(path, "Drop=1")
    with pytest.raises(ConfigError, match=f"{path} has no seed"):
        FaultFile(str(path)).read()

    replace(path, "seed=1")
    file = FaultFile(str(path))
    file.read()
    path.unlink()
    with pytest.raises(ConfigError, match=f"{path} is gone"):
        file.renewed()


def test_every_plan_is_logged_as_an_error_and_every_fault_is_counted(tmp_path: Path) -> None:
    registry, path = CollectorRegistry(), tmp_path / "plan"
    replace(path, "seed=1,Drop=1")
    with memfd(NBYTES) as fd, capture_logs() as logs:
        inner = LocalTransport(arena_fd=fd, arena_nbytes=NBYTES, deadlines=Deadlines())
        transport = inject_faults(
            inner,
            f"@{path}",
            arena_fd=fd,
            arena_nbytes=NBYTES,
            counter=Telemetry(registry).injected_faults,
        )
        side = Side(transport, fd, NBYTES)
        transport.start()
        peer = side.wait(Ready)
        side.write(peer, source=0, destination=8, nbytes=8)
        replace(path, "seed=1,Delay=1")
        side.write(peer, source=0, destination=8, nbytes=8)
        transport.close()

    seen = {
        fault: registry.get_sample_value("pdcluster_injected_faults_total", {"fault": fault})
        for fault in Fault
    }
    assert {**dict.fromkeys(Fault, 0.0), Fault.DROP: 1.0, Fault.DELAY: 1.0} == seen
    wanted = [("error", {"Drop": 1.0}), ("error", {"Delay": 1.0})]
    assert wanted == [(line["log_level"], line["shares"]) for line in logs]


def test_without_a_plan_there_is_no_series() -> None:
    registry = CollectorRegistry()
    Telemetry(registry)

    [family] = [f for f in registry.collect() if f.name == "pdcluster_injected_faults"]
    assert [] == family.samples
