"""What the control plane costs one request, beside SGLang's own connection classes.

Ours: two engine processes (owner loop, node, link) without model and fabric, two sidecar processes
with signatures and ZMQ. Theirs: two processes with SGLang's managers, senders and receivers over an
instant transfer engine. The driver stands where the router is, and is the same for both. What is
and is not the same is told in docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec

from bench import peers
from bench.exchange import Found, Shape, System, cpu_seconds, drive
from bench.figures import Report, median, percentile
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.ids import Role
from support.sidecars import SidecarProcess, running

ROUNDS = 3
P50_MS_MAX, P99_MS_MAX, RATIO_MAX = 2.0, 10.0, 1.0
IDLE_SECONDS = 3.0
ROOT = Path(__file__).resolve().parents[1]
ROOTS = ("protocol", "engine", "tests", ".")
WARM_UP = Shape(name="warm-up", requests=200, parallel=4)
ONE = Shape(name="1 at a time", requests=500, parallel=1)
SIXTEEN = Shape(name="16 in flight", requests=2000, parallel=16, pause_seconds=0.05)
FLAT_OUT = Shape(name="16 without a pause", requests=2000, parallel=16)
SHAPES = (ONE, SIXTEEN, FLAT_OUT)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
"""SGLang's settings want a model's description; nobody loads one."""

Results = dict[str, list[Found]]


def run(report: Report) -> None:
    """Measure and print."""
    report.title("control plane: one request, from its room to its conclusion")
    asyncio.run(_compare(report))


async def _compare(report: Report) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdb")))
        async with _ours(folder) as ours:
            theirs = stack.enter_context(_theirs(folder)) if peers.installed() else None
            systems = [ours, *([] if theirs is None else [theirs])]
            results: dict[str, Results] = {system.name: {} for system in systems}
            for system in systems:
                drive(system, WARM_UP)
            # In turn, so that a disturbance of the machine meets both.
            for shape in SHAPES:
                for _ in range(report.times(ROUNDS)):
                    for system in systems:
                        with _others_still(systems, system):
                            found = drive(system, shape)
                        results[system.name].setdefault(shape.name, []).append(found)
            _tell(report, results)
            for system in systems:
                with _others_still(systems, system):
                    share = _idle_share(system)
                report.line(f"CPU while nothing is asked, {system.name}: {share:.1%} of a core")
            _judge(report, results)


@contextlib.contextmanager
def _others_still(systems: Sequence[System], measured: System) -> Iterator[None]:
    """Stop what polls beside the one that is measured: it takes a fifth of a core for nothing."""
    others = [other for other in systems if other is not measured and other.polls]
    processes = [side for other in others for side in (other.prefill, other.decode)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _idle_share(system: System) -> float:
    """What all processes of a system take of one core with no request open."""
    before = sum(cpu_seconds(pid) for pid in system.counted.values())
    time.sleep(IDLE_SECONDS)
    return (sum(cpu_seconds(pid) for pid in system.counted.values()) - before) / IDLE_SECONDS


def _tell(report: Report, results: dict[str, Results]) -> None:
    rows = []
    for shape in SHAPES:
        for system, found in results.items():
            rounds = found[shape.name]
            cells = [f"{_ms(rounds, 'control', percent):.2f}" for percent in (50, 99)]
            parts = ("admission", "hand_over", "conclusion")
            cells += [f"{_ms(rounds, part, 50):.2f}" for part in parts]
            rate = median([len(each.exchanges) / each.seconds for each in rounds])
            cpu = median([each.cpu_per_request() for each in rounds]) * 1e6
            rows.append((shape.name, system, *cells, f"{rate:.0f}", f"{cpu:.0f}"))
    columns = ("load", "", "p50 ms", "p99 ms", "admit", "hand over", "conclude", "1/s", "CPU us")
    report.table(columns, rows)
    for system, found in results.items():
        rounds = found[FLAT_OUT.name]
        parts = {
            name: median([each.cpu_seconds[name] / len(each.exchanges) for each in rounds])
            for name in rounds[0].cpu_seconds
        }
        told = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in parts.items())
        report.line(f"CPU us a request without a pause, {system}: {told}")


def _judge(report: Report, results: dict[str, Results]) -> None:
    ours = results["ours"]
    sixteen = ours[SIXTEEN.name]
    report.limit(
        "control, 16 in flight, p50", _ms(sixteen, "control", 50), limit=P50_MS_MAX, unit="ms"
    )
    report.limit(
        "control, 16 in flight, p99", _ms(sixteen, "control", 99), limit=P99_MS_MAX, unit="ms"
    )
    theirs = results.get("SGLang")
    if theirs is None:
        report.unmeasured("control, ours / SGLang's classes", peers.HOW)
        return
    for shape in SHAPES:
        ratios = [
            percentile(one.of("control"), 50) / percentile(other.of("control"), 50)
            for one, other in zip(ours[shape.name], theirs[shape.name], strict=True)
        ]
        what = f"control, {shape.name}, p50 of ours / SGLang's classes"
        report.limit(what, median(ratios), limit=RATIO_MAX, unit="times")


def _ms(rounds: list[Found], name: str, percent: float) -> float:
    """The median of the rounds' percentiles."""
    return median([percentile(each.of(name), percent) for each in rounds]) * 1e3


# --- the two systems ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _ours(folder: Path) -> AsyncIterator[System]:
    sidecars = {role: SidecarProcess(folder / role, role) for role in Role}
    async with running(*sidecars.values()):
        with contextlib.ExitStack() as stack:
            engines = {role: stack.enter_context(_engine(folder, sidecars, role)) for role in Role}
            for engine in engines.values():
                await asyncio.to_thread(_wait_ready, engine)
            counted = {f"{role} engine": engine.pid for role, engine in engines.items()}
            counted |= {f"{role} sidecar": sidecar.pid for role, sidecar in sidecars.items()}
            yield System("ours", engines[Role.PREFILL], engines[Role.DECODE], counted)


@contextlib.contextmanager
def _engine(
    folder: Path, sidecars: dict[Role, SidecarProcess], role: Role
) -> Iterator[subprocess.Popen[bytes]]:
    pod = sidecars[role].config
    config = EngineConfig(
        cluster=pod.cluster,
        instance=pod.instance,
        role=role,
        host=pod.host,
        http_port=pod.engine_http_port,
        link_path=pod.link_path,
        keys_folder=pod.keys_folder,
        model_source="builtin://none",
        served_name="tiny",
        max_context=2048,
        transport="local",
        fingerprint=pod.fingerprint,
    )
    file = folder / role / "engine.json"
    file.write_bytes(msgspec.json.encode(config))
    bootstrap = str(sidecars[Role.PREFILL].http)
    with (folder / role / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.null_engine", str(file), bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in ROOTS),
                "OMP_NUM_THREADS": "1",
            },
        )
    try:
        yield process
    finally:
        peers.end(process)


@contextlib.contextmanager
def _theirs(folder: Path) -> Iterator[System]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_bytes(msgspec.json.encode(MODEL))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        registry = peers.start("sglang_registry.py", "127.0.0.1", port)
        stack.callback(peers.end, registry)
        sides = []
        for role in ("prefill", "decode"):
            side = peers.start("sglang_pair.py", role, port, str(model), stdout=subprocess.PIPE)
            stack.callback(peers.end, side)
            _wait_ready(side)
            sides.append(side)
        counted = {"prefill": sides[0].pid, "decode": sides[1].pid, "registry": registry.pid}
        yield System("SGLang", *sides, counted, polls=True)


def _wait_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"a process of the benchmark ended with {process.wait()}")
