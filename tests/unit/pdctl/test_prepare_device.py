"""How an engine process is started depends on its device: on a GPU never by a fork."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdcluster_operator.plan import Plan
from pdcluster_protocol.ids import Role
from pdctl import prepare
from pdctl.processes import ProcessSpec


@pytest.mark.parametrize(
    ("nurseries", "forked", "devices"),
    [
        (1, [True, True], {}),
        (1, [True, False], {Role.DECODE: "cuda:1"}),
        (0, [False, False], {Role.PREFILL: "cuda", Role.DECODE: "cuda"}),
    ],
    ids=["cpu", "mixed", "cuda"],
)
def test_an_engine_on_a_gpu_is_executed_and_not_forked(
    nurseries: int, forked: list[bool], devices: dict[Role, str], local_plan: Plan, tmp_path: Path
) -> None:
    processes = started(local_plan, devices, tmp_path)

    assert nurseries == len([p for p in processes if p.kind == "nursery"])
    engines = [p for p in processes if p.kind == "engine"]
    assert forked == [engine.forked for engine in engines]
    assert all("pdcluster_engine" in engine.argv for engine in engines)


def started(plan: Plan, devices: dict[Role, str], folder: Path) -> list[ProcessSpec]:
    """The processes of a plan whose roles run on these devices."""
    (folder / prepare.CONFIGS_FOLDER).mkdir()
    pods = tuple(
        msgspec.structs.replace(
            pod,
            engines=tuple(
                msgspec.structs.replace(engine, device=devices.get(pod.role, "cpu"))
                for engine in pod.engines
            ),
        )
        for pod in plan.pods
    )
    return list(prepare._processes(msgspec.structs.replace(plan, pods=pods), folder))
