"""A local cluster for one benchmark: an own runtime folder, own ports, and an end in any case.

It is started by `pdctl up --detach` and ended by `pdctl down`, as a person would. Everything that a
benchmark reads beside the answers comes from outside the processes: /proc, metrics, logs.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from pdctl.control import ask_state
from pdctl.processes import RUN_FILE, ProcessSpec, RunSpec, RunState
from support.ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/local.yaml"
UP_SECONDS = 120.0
DOWN_SECONDS = 15.0
_READY = re.compile(r"ready in ([0-9.]+) s \(CPU ([0-9.]+) s\)")


class Cluster(msgspec.Struct, frozen=True):
    """A running cluster, and what its start cost."""

    spec: RunSpec
    state: RunState
    told: str
    """What `pdctl up` printed."""
    ready_seconds: float
    """From the start of the command's process to its line `ready in`."""
    cpu_seconds: float
    """Of all processes of the run until then."""

    def engine(self, role: str) -> str:
        """The URL of the one engine of a role."""
        return f"http://{self._engine_spec(role).ports[0]}"

    def log(self, role: str) -> Path:
        """The log of the one engine of a role."""
        name = self._engine_spec(role).name.replace("/", "-")
        return Path(self.spec.folder) / "logs" / f"{name}.log"

    def pid(self, name: str) -> int:
        """The pid of a process of the run."""
        return next(process.pid for process in self.state.processes if process.name == name)

    def engine_pid(self, role: str) -> int:
        return self.pid(self._engine_spec(role).name)

    def _engine_spec(self, role: str) -> ProcessSpec:
        return next(p for p in self.spec.processes if p.kind == "engine" and p.role == role)


@contextlib.contextmanager
def running(model: str) -> Iterator[Cluster]:
    """One prefill and one decode engine of a built-in model behind a router.

    Raises:
        RuntimeError: `pdctl up` failed; the message is what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="pdb") as runtime:
        environment = {**os.environ, "XDG_RUNTIME_DIR": runtime, "PYTHONUNBUFFERED": "1"}
        try:
            told, ready_seconds = _up(_spec_file(Path(runtime), model), environment)
            yield _found(Path(runtime), told, ready_seconds)
        finally:
            _pdctl("down", environment=environment, timeout_seconds=DOWN_SECONDS)


def _spec_file(folder: Path, model: str) -> Path:
    """The example with another model."""
    spec = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    spec["metadata"]["name"] = "bench"
    spec["spec"]["model"] |= {"source": f"builtin://{model}", "servedName": model}
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return path


def _up(spec_file: Path, environment: dict[str, str]) -> tuple[str, float]:
    port, admin_port = free_ports()
    command = _command(
        "up", "-f", str(spec_file), "--detach", "--port", port, "--admin-port", admin_port
    )
    started = time.monotonic()
    ready_seconds = 0.0
    told = ""
    # Into a file: the detached supervisor would keep a pipe open for ever.
    with (spec_file.parent / "up.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while process.poll() is None and time.monotonic() - started < UP_SECONDS:
            time.sleep(0.02)
            told = Path(log.name).read_text(encoding="utf-8")
            if not ready_seconds and _READY.search(told):
                ready_seconds = time.monotonic() - started
        process.kill()
        told = Path(log.name).read_text(encoding="utf-8")
    if process.wait() != 0 or not ready_seconds:
        message = f"pdctl up ended with {process.returncode}:\n{told}"
        raise RuntimeError(message)
    return told, ready_seconds


def _found(runtime: Path, told: str, ready_seconds: float) -> Cluster:
    (run_file,) = runtime.glob(f"pdcluster/slot-*/{RUN_FILE}")
    spec = msgspec.json.decode(run_file.read_bytes(), type=RunSpec)
    ready = _READY.search(told)
    cpu_seconds = float(ready[2]) if ready else 0.0
    return Cluster(spec, ask_state(run_file.parent), told, ready_seconds, cpu_seconds)


def _pdctl(*arguments: str, environment: dict[str, str], timeout_seconds: float) -> None:
    subprocess.run(
        _command(*arguments),
        env=environment,
        timeout=timeout_seconds,
        check=False,
        capture_output=True,
    )


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pdctl", *arguments]
