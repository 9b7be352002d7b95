"""From a plan to a run folder: claims, configuration files, keys, and the list of processes."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdcluster_operator.place import (
    TRANSPORT_PORT_COUNT,
    TRANSPORT_PORT_MIN,
    Place,
    engine_count,
    place_locally,
)
from pdcluster_operator.plan import Plan, PodPlan
from pdcluster_protocol.config import EngineConfig, RouterConfig, SidecarConfig
from pdcluster_protocol.errors import ConfigError
from pdctl.preflight import require_free_ports
from pdctl.processes import LOGS_FOLDER, RUN_FILE, ProcessSpec, RunSpec
from pdctl.run_folder import Claim, claim_slot, claim_transport_ranges, run_folder

KEY_ID = "local-1"
KEY_BYTES = 32
CONFIGS_FOLDER = "configs"
KEYS_FOLDER = "keys"


class Prepared(msgspec.Struct, frozen=True):
    """A run that can be started: everything is on disk, and the claims are held."""

    spec: RunSpec
    plan: Plan
    claims: tuple[Claim, ...]

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.spec.folder)


def prepare(plan: Plan, base: Path, *, source_folder: Path, port: int, admin_port: int) -> Prepared:
    """Claim a slot and ports, place the plan, and write what its processes read.

    Raises:
        ConfigError: no slot or ports are left, a port is busy, or the folder cannot be written;
            nothing is left behind then.
    """
    claims = [claim_slot(base)]
    try:
        claims += claim_transport_ranges(
            base,
            engine_count(plan),
            first_port=lambda number: TRANSPORT_PORT_MIN + number * TRANSPORT_PORT_COUNT,
        )
        slot, ranges = claims[0], claims[1:]
        folder = run_folder(base, slot.number)
        place = Place(
            slot=slot.number,
            run_folder=str(folder),
            source_folder=str(source_folder),
            router_port=port,
            admin_port=admin_port,
            transport_ranges=tuple(claim.number for claim in ranges),
        )
        placed = place_locally(plan, place)
        require_free_ports(placed)
        spec = _write(placed, folder, tuple(str(claim.path) for claim in claims))
    except BaseException as error:
        # It may hold a key already, and without its lock nobody owns it.
        shutil.rmtree(run_folder(base, claims[0].number), ignore_errors=True)
        for held in claims:
            held.release()
        if isinstance(error, OSError):
            raise ConfigError(
                f"the run folder in {base} cannot be written: {error.strerror}; make room there or"
                " set XDG_RUNTIME_DIR to another folder"
            ) from error
        raise
    return Prepared(spec, placed, tuple(claims))


def _write(plan: Plan, folder: Path, lock_files: tuple[str, ...]) -> RunSpec:
    folder.mkdir(mode=0o700)
    for name in (CONFIGS_FOLDER, LOGS_FOLDER, KEYS_FOLDER):
        (folder / name).mkdir(mode=0o700)
    _write_private(folder / KEYS_FOLDER / KEY_ID, secrets.token_bytes(KEY_BYTES))
    router = plan.routers[0]
    spec = RunSpec(
        cluster=plan.cluster,
        folder=str(folder),
        lock_files=lock_files,
        endpoint=f"http://{router.host}:{router.port}",
        admin=f"http://{router.host}:{router.admin_port}",
        served_name=router.served_name,
        processes=tuple(_processes(plan, folder)),
    )
    _write_private(folder / RUN_FILE, msgspec.json.encode(spec))
    return spec


def _processes(plan: Plan, folder: Path) -> Iterator[ProcessSpec]:
    if any(_forked(engine) for pod in plan.pods for engine in pod.engines):
        yield ProcessSpec(name="nursery", kind="nursery", argv=_module("pdcluster_engine.nursery"))
    for router in plan.routers:
        yield _router(router, folder)
    for pod in plan.pods:
        yield _sidecar(pod, folder)
        for engine in pod.engines:
            yield _engine(engine, folder)


def _router(config: RouterConfig, folder: Path) -> ProcessSpec:
    path = _config(folder, config.instance, config)
    return ProcessSpec(
        name=config.instance,
        kind="router",
        argv=(*_module("pdcluster_sidecar.router"), "--config", path),
        config=path,
        instance=config.instance,
        role="router",
        ports=(f"{config.host}:{config.port}", str(config.admin_port)),
        listen_url=f"http://{config.host}:{config.port}/health",
        ready_url=f"http://{config.host}:{config.port}/ready",
    )


def _sidecar(pod: PodPlan, folder: Path) -> ProcessSpec:
    config = pod.sidecar
    # A replica of one pod has one sidecar, which needs no number.
    name = f"sidecar-{config.node}" if config.node else "sidecar"
    path = _config(folder, f"{config.instance}-{name}", config)
    ports = config.control_ports
    control = f"{ports[0]}-{ports[-1]}" if len(ports) > 1 else str(ports[0])
    return ProcessSpec(
        name=f"{config.instance}/{name}",
        kind="sidecar",
        argv=(*_module("pdcluster_sidecar"), "--config", path),
        config=path,
        instance=config.instance,
        role=config.role,
        ports=(f"{config.host}:{config.http_port}", control),
        listen_url=f"http://{config.host}:{config.http_port}/health",
        ready_url=f"http://{config.host}:{config.http_port}/ready",
    )


def _forked(config: EngineConfig) -> bool:
    """Whether the nursery may fork this engine.

    A forked child cannot use CUDA that its parent has touched, and importing libraries on a machine
    with a GPU may touch it; so an engine on a GPU is a fresh process. One on the CPU never asks.
    """
    return config.device == "cpu"


def _engine(config: EngineConfig, folder: Path) -> ProcessSpec:
    name = f"engine-{config.dp_rank}"
    path = _config(folder, f"{config.instance}-{name}", config)
    parallel = config.parallel
    ranks = f"dp{config.dp_rank}"
    if parallel.ranks_per_dp > 1:
        ranks += f" (tp{parallel.attention_tp} cp{parallel.cp} pp{parallel.pp})"
    return ProcessSpec(
        name=f"{config.instance}/{name}",
        kind="engine",
        argv=(*_module("pdcluster_engine"), "--config", path),
        forked=_forked(config),
        config=path,
        instance=config.instance,
        role=config.role,
        ranks=ranks,
        ports=(
            f"{config.host}:{config.http_port}",
            f"{config.transport_port_min}-{config.transport_port_max}",
        ),
        ready_url=f"http://{config.host}:{config.http_port}/health",
    )


def _module(name: str) -> tuple[str, ...]:
    # -P: the folder a user happens to stand in is no source of modules.
    return (sys.executable, "-P", "-m", name)


def _config(folder: Path, name: str, config: EngineConfig | SidecarConfig | RouterConfig) -> str:
    path = folder / CONFIGS_FOLDER / f"{name}.json"
    _write_private(path, msgspec.json.format(msgspec.json.encode(config), indent=2))
    return str(path)


def _write_private(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
