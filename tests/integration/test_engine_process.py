"""Engine processes from a warm nursery: HTTP in, pages over Mooncake, and how they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.ids import RankAddress, Role
from support.legs import LegClient, prompt_of
from support.nursery import (
    Nursery,
    children,
    cpu_seconds,
    deadline_in,
    environment,
    resident_bytes,
    wait_gone,
)
from support.ports import fresh_host, transfer_ports
from support.promptness import PROMPT_SECONDS
from support.relay import Port, Relay

HOSTS = {role: fresh_host() for role in Role}
BOOTSTRAP = RankAddress(HOSTS[Role.PREFILL], 8998)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("n")) as warm:
        yield warm


def configuration(
    nursery: Nursery, role: Role, *, instance: str = "", **changes: Any
) -> EngineConfig:
    instance = instance or f"test-{role}-0"
    values: dict[str, Any] = {
        "cluster": "test",
        "instance": instance,
        "role": role,
        "host": HOSTS[role],
        "http_port": 30000,
        "link_path": str(nursery.folder / f"link-{instance}"),
        "keys_folder": str(nursery.folder / "keys"),
        "model_source": "builtin://tiny-glm",
        "served_name": "tiny-glm",
        "max_context": 2048,
        **transfer_ports(),
    }
    return EngineConfig(**{**values, **changes})


class Engines:
    """A prefill and a decode process between which a relay passes messages."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.configs = {role: configuration(nursery, role) for role in Role}
        addresses = {Role.PREFILL: BOOTSTRAP, Role.DECODE: RankAddress(HOSTS[Role.DECODE], 8998)}
        self.ports = {
            role: Port(config.link_path, incarnation=f"inc-{role}", address=addresses[role])
            for role, config in self.configs.items()
        }
        self.relay = Relay({addresses[role]: port for role, port in self.ports.items()})
        self.relay.__enter__()
        self.pids = {role: nursery.fork(config) for role, config in self.configs.items()}
        self.relay.wait_joined()
        key = (nursery.folder / "keys" / "k1").read_bytes()
        self.client = LegClient(key, bootstrap=BOOTSTRAP)
        self.prefill, self.decode = (f"http://{HOSTS[role]}:30000" for role in Role)

    async def run_pair(self, leg: dict[str, Any]) -> tuple[Any, Any]:
        return await self.client.run_pair(self.prefill, self.decode, leg)

    def close(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGTERM)
        for pid in self.pids.values():
            self.nursery.exit_of(pid)
        self.relay.__exit__(None, None, None)
        for config in self.configs.values():
            Path(config.link_path).unlink()


@pytest.fixture(scope="module")
def engines(nursery: Nursery) -> Iterator[Engines]:
    running = Engines(nursery)
    yield running
    running.close()


async def test_a_prompt_of_64_tokens_moves_over_mooncake_with_the_same_tokens(
    engines: Engines,
) -> None:
    client = engines.client
    leg = client.leg(prompt_of(64))
    expected = await client.generate(engines.decode, client.alone(leg), signed=False)
    before = await client.metrics(engines.prefill)
    first, second = await engines.run_pair(leg)
    assert expected["output_ids"] == second["output_ids"]
    assert expected["text"] == second["text"]
    wanted, got = (
        answer["meta_info"]["output_token_logprobs"][0][0] for answer in (expected, second)
    )
    assert wanted == got
    assert expected["output_ids"][:1] == first["output_ids"]
    after = await client.metrics(engines.prefill)
    hello = engines.ports[Role.PREFILL].hello
    assert hello is not None
    name = 'pdcluster_kv_bytes_total{kind="kv"}'
    assert 64 * hello.layout.bytes_per_token == after[name] - before.get(name, 0.0)


async def test_a_dead_transfer_process_delays_requests_and_fails_none(engines: Engines) -> None:
    (transfer,) = children(engines.pids[Role.DECODE])
    os.kill(transfer, signal.SIGKILL)
    wait_gone(transfer)
    _, second = await engines.run_pair(engines.client.leg(prompt_of(100)))
    assert 16 == len(second["output_ids"])
    (successor,) = children(engines.pids[Role.DECODE])
    assert transfer != successor


async def test_a_leg_that_nobody_signed_is_refused(engines: Engines) -> None:
    answer = await engines.client.generate(
        engines.decode, engines.client.leg(prompt_of(8)), signed=False
    )
    assert "Unauthorized" == answer["error"]["code"]


async def test_an_engine_is_small_and_idle_when_nothing_happens(engines: Engines) -> None:
    await engines.run_pair(engines.client.leg(prompt_of(64)))
    pids = list(engines.pids.values())
    pids += [child for pid in list(pids) for child in children(pid)]
    before = {pid: cpu_seconds(pid) for pid in pids}
    begun = time.monotonic()
    await asyncio.to_thread(engines.relay.wait_pulses, engines.ports[Role.DECODE], 6)
    elapsed = time.monotonic() - begun
    spent = {pid: (cpu_seconds(pid) - before[pid]) / elapsed for pid in pids}
    # A clock tick is 0.01 s: over 3 s one tick more or less is 0.3 % of a core.
    assert max(spent.values()) <= 0.0134, spent
    sizes = {role: resident_bytes(pid) for role, pid in engines.pids.items()}
    assert max(sizes.values()) <= 1_000_000_000, sizes


def test_the_nursery_has_one_thread_and_refuses_what_makes_no_sense(nursery: Nursery) -> None:
    assert 1 == nursery.threads
    for line in (b"no json", b'{"op":"fork"}', b'{"op":"spawn"}', b'{"op":"fork","config":1}'):
        nursery.send(line)
        assert "error" in nursery.answer()


def test_sigterm_ends_an_engine_and_its_transfer_process_promptly(
    nursery: Nursery,
) -> None:
    config = configuration(nursery, Role.PREFILL, instance="stopped", http_port=30010)
    pid = _serving(nursery, config)
    transfer = children(pid)
    begun = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert 0 == nursery.exit_of(pid)
    assert time.monotonic() - begun < PROMPT_SECONDS
    for child in transfer:
        wait_gone(child)


def test_a_killed_engine_takes_its_transfer_process_with_it(nursery: Nursery) -> None:
    config = configuration(nursery, Role.DECODE, instance="killed", http_port=30010)
    pid = _serving(nursery, config)
    (transfer,) = children(pid)
    os.kill(pid, signal.SIGKILL)
    assert -signal.SIGKILL == nursery.exit_of(pid)
    wait_gone(transfer)


def test_a_refused_engine_leaves_with_its_own_code_and_the_cause(nursery: Nursery) -> None:
    path = str(nursery.folder / "link-refused")
    config = configuration(
        nursery, Role.DECODE, instance="refused", http_port=30011, link_path=path
    )
    port = Port(path, incarnation="", address=BOOTSTRAP, refused="the fingerprint differs")
    with Relay({BOOTSTRAP: port}):
        pid = nursery.fork(config)
        assert 3 == nursery.exit_of(pid)
    assert "the fingerprint differs" in nursery.log_of(config).read_text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_source": "builtin://huge"}, "builtin://tiny-glm"),
        ({"keys_folder": "/nonexistent/keys"}, "keys_folder"),
        ({"max_context": 1 << 20}, "max_context is 1048576"),
        ({"pages": 3}, "pages is 3"),
        ({"http_port": 30099}, "http_port 30099"),
    ],
    ids=["model", "keys", "context", "pages", "port"],
)
def test_a_wrong_configuration_ends_with_2_and_one_line(
    nursery: Nursery, changes: dict[str, Any], says: str
) -> None:
    instance = f"wrong-{'-'.join(changes)}"
    config = configuration(nursery, Role.DECODE, instance=instance, **changes)
    if "http_port" in changes:
        with _occupied(config.host, config.http_port):
            status = nursery.exit_of(nursery.fork(config))
    else:
        status = nursery.exit_of(nursery.fork(config))
    said = nursery.log_of(config).read_text()
    assert 2 == status
    (line,) = [line for line in said.splitlines() if not line.startswith("{")]
    assert says in line


def test_the_end_of_its_supervisor_ends_nursery_and_engines(tmp_path: Path) -> None:
    with Nursery(tmp_path) as own:
        pid = _serving(own, configuration(own, Role.DECODE, instance="orphan", http_port=30012))
    wait_gone(pid)


def test_print_config_shows_all_fields_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(b'{"role": "decode", "colour": 1}')
    wrong = _run_cold("--config", str(path))
    assert (2, 1) == (wrong.returncode, len(wrong.stderr.splitlines()))
    assert str(path) in wrong.stderr
    missing = _run_cold("--config", str(tmp_path / "none"))
    assert 2 == missing.returncode
    full = {
        "cluster": "c",
        "instance": "i",
        "role": "decode",
        "host": "127.0.0.1",
        "link_path": "l",
        "keys_folder": "k",
        "model_source": "builtin://tiny-glm",
        "served_name": "m",
        "max_context": 8,
    }
    path.write_bytes(msgspec.json.encode(full))
    shown = json.loads(_run_cold("--config", str(path), "--print-config").stdout)
    assert full.items() <= shown.items()
    assert 64 == shown["page_size"]


def _run_cold(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdcluster_engine", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _serving(nursery: Nursery, config: EngineConfig) -> int:
    """Fork an engine and wait until it says that it serves."""
    pid = nursery.fork(config)
    path, deadline = nursery.log_of(config), deadline_in(30)
    while "serving" not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        os.sched_yield()
    return pid


def _occupied(host: str, port: int) -> Any:
    import socket

    return socket.create_server((host, port))
