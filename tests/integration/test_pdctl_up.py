"""`pdctl up` with the real processes: ready, proven, asked, and gone without a trace."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.preflight import can_listen
from pdctl.proc import descendants
from pdctl.web import exchange
from support.ports import free_ports
from support.promptness import PROMPT_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "examples/local.yaml"
DEADLINE_SECONDS = 60.0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short, empty runtime folder: paths of sockets must fit."""
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield Path(folder)


def pdctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdctl", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


class Foreground:
    """`pdctl up` as a person runs it, its output read line by line."""

    def __init__(self, *arguments: str) -> None:
        self.port, admin_port = free_ports()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "pdctl", "up", "-f", str(LOCAL), "--port", self.port,
             "--admin-port", admin_port, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.output = ""

    def until(self, text: str) -> str:
        """Read until a line holds `text`; all that was printed so far."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text not in self.output:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self.popen.stdout], [], [], left)[0], self.output
            chunk = os.read(self.popen.stdout.fileno(), 65536)
            assert chunk, self.output
            self.output += chunk.decode()
        return self.output

    def pids(self) -> list[int]:
        return descendants(self.popen.pid)[1:]

    def close(self) -> None:
        assert self.popen.stdout is not None
        self.popen.kill()
        self.popen.wait(DEADLINE_SECONDS)
        self.popen.stdout.close()


@pytest.fixture
def foreground(runtime: Path) -> Iterator[Foreground]:
    run = Foreground()
    yield run
    run.close()
    until_gone(runtime, [])


def until_gone(runtime: Path, pids: list[int]) -> None:
    """Wait for the ends of processes and for the last file to go."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([pidfd], [], [], 10.0)[0], f"process {pid} is left"
        os.close(pidfd)
    deadline = time.monotonic() + 10.0
    while list(runtime.iterdir()) and time.monotonic() < deadline:
        select.select([], [], [], 0.02)
    assert [] == list(runtime.rglob("*"))
    assert str(runtime) not in Path("/proc/net/unix").read_text()


def test_up_proves_itself_and_ctrl_c_leaves_nothing(runtime: Path, foreground: Foreground) -> None:
    told = foreground.until("try       curl ")
    pids = foreground.pids()

    assert re.search(r"ready in [0-9.]+ s \(CPU [0-9.]+ s\)", told)
    assert "canary    local-prefill-0 -> local-decode-0: ok in" in told
    assert re.search(r"answer    .+ \([0-9]+ \+ 32 tokens, [0-9.]+ s\)", told)
    assert "checked   one process alone answers the same" in told
    for word in ("prefill", "decode", "router", "sidecar", "engine", "transfer", "nursery"):
        assert re.search(rf"^.*\b{word}\b.* [0-9]+ MB", told, re.MULTILINE), word
    assert len(pids) >= 9

    started = time.monotonic()
    foreground.popen.send_signal(signal.SIGINT)
    foreground.popen.wait(DEADLINE_SECONDS)

    assert time.monotonic() - started < PROMPT_SECONDS
    assert 0 == foreground.popen.returncode
    until_gone(runtime, pids)
    assert can_listen("127.0.0.1", int(foreground.port))
    sidecar = re.search(r"(127\.64\.[0-9]+\.1):8998", told)
    assert sidecar is not None
    assert can_listen(sidecar[1], 8998)


def test_a_killed_pdctl_leaves_nothing(runtime: Path, foreground: Foreground) -> None:
    foreground.until("starting local")
    foreground.until("router local-router-0 is ready")
    pids = foreground.pids()

    foreground.popen.kill()
    foreground.popen.wait(DEADLINE_SECONDS)

    until_gone(runtime, pids)


def test_sigterm_while_starting_leaves_nothing(runtime: Path, foreground: Foreground) -> None:
    foreground.until("starting local")

    foreground.popen.terminate()
    foreground.popen.wait(DEADLINE_SECONDS)

    assert 0 == foreground.popen.returncode
    until_gone(runtime, [])


def test_a_detached_cluster_is_asked_survives_a_death_and_is_ended(runtime: Path) -> None:
    port, admin_port = free_ports()
    up = pdctl("up", "-f", str(LOCAL), "--detach", "--port", port, "--admin-port", admin_port)
    assert 0 == up.returncode, up.stderr
    try:
        assert "end it with: pdctl down" in up.stdout
        generated = pdctl("generate", "Once upon", "--max-tokens", "20")
        assert (0, "") == (generated.returncode, generated.stderr)
        assert generated.stdout.strip()

        twice = pdctl("up", "-f", str(LOCAL))
        assert 2 == twice.returncode
        assert f"cluster 'local' runs already at http://127.0.0.1:{port};" in twice.stderr

        shown = pdctl("ps").stdout
        killed = pid_in(shown, "prefill", "engine")
        os.kill(killed, signal.SIGKILL)
        assert generated.stdout == until_generated()
        again = pdctl("ps").stdout
        assert killed != pid_in(again, "prefill", "engine")
        assert "1 restarts, last exit -9" in again
        assert pid_in(shown, "decode", "engine") == pid_in(again, "decode", "engine")
        [run] = json.loads(pdctl("ps", "--json").stdout)
        assert f"http://127.0.0.1:{port}" == run["endpoint"]
        listed = {(p["role"], p["kind"]): p for p in run["processes"]}
        assert pid_in(again, "prefill", "engine") == listed["prefill", "engine"]["pid"]
        assert 1 == listed["prefill", "engine"]["restarts"]
        assert 1 == len(listed["decode", "engine"]["transfers"])

        answer = exchange("GET", f"http://127.0.0.1:{port}/v1/models", timeout_seconds=5)
        assert "tiny-glm" == json.loads(answer.body)["data"][0]["id"]
    finally:
        down = pdctl("down")
    assert (0, "local ended\n") == (down.returncode, down.stdout)
    until_gone(runtime, [])
    assert "nothing runs\n" == pdctl("ps").stdout
    assert [] == json.loads(pdctl("ps", "--json").stdout)


def pid_in(table: str, role: str, process: str) -> int:
    line = next(
        line for line in table.splitlines() if line.split()[:1] == [role] and f" {process} " in line
    )
    found = re.search(r" ([0-9]+) +[0-9]+ MB", line)
    assert found is not None, line
    return int(found[1])


def until_generated() -> str:
    """The same prompt again, until the restarted engine serves it."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        generated = pdctl("generate", "Once upon", "--max-tokens", "20")
        if generated.returncode == 0:
            return generated.stdout
        assert time.monotonic() < deadline, generated.stderr


def test_a_busy_port_is_named_before_anything_starts(runtime: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = pdctl("up", "-f", str(LOCAL), "--port", port)

    assert 2 == done.returncode
    assert f"pdctl: port {port} on 127.0.0.1 is busy;" in done.stderr
    assert "--port" in done.stderr
    assert 1 == done.stderr.count("\n")
    until_gone(runtime, [])


def test_a_model_without_weights_is_refused_before_anything_starts(runtime: Path) -> None:
    done = pdctl("up", "-f", str(ROOT / "examples/glm-5.3.yaml"))

    assert 2 == done.returncode
    assert "glm-5.3 has no weights" in done.stderr
    until_gone(runtime, [])


def test_a_context_beyond_the_model_ends_the_start_with_the_engines_words(runtime: Path) -> None:
    """What only the engine can know is still told in one line, and everything ends."""
    spec = LOCAL.read_text().replace("maxContext: 8192", "maxContext: 100000")
    path = runtime.parent / f"{runtime.name}.yaml"
    path.write_text(spec)
    port, admin_port = free_ports()
    try:
        done = pdctl("up", "-f", str(path), "--port", port, "--admin-port", admin_port)
    finally:
        path.unlink()

    assert 2 == done.returncode
    assert "100000" in done.stderr
    assert 1 == done.stderr.count("\n")
    until_gone(runtime, [])


def test_nothing_running_is_said(runtime: Path) -> None:
    for command in (("down",), ("generate", "Hi")):
        done = pdctl(*command)
        assert 2 == done.returncode
        assert "no cluster runs here; start one with pdctl up -f FILE" in done.stderr
    until_gone(runtime, [])


def test_a_terminal_is_shown_live_counters(runtime: Path) -> None:
    port, admin_port = free_ports()
    parent, terminal = os.openpty()
    popen = subprocess.Popen(
        [sys.executable, "-m", "pdctl", "up", "-f", str(LOCAL), "--port", port,
         "--admin-port", admin_port],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    shown = ""
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not re.search(r"requests [1-9][0-9]* answered, 0 not +tokens [1-9]", shown):
            left = max(0.0, deadline - time.monotonic())
            assert select.select([parent], [], [], left)[0], shown
            shown += os.read(parent, 65536).decode()
        popen.send_signal(signal.SIGINT)
        popen.wait(DEADLINE_SECONDS)
    finally:
        popen.kill()
        popen.wait(DEADLINE_SECONDS)
        os.close(parent)
    assert re.search(r"KV moved 0\.[0-9] MB", shown)
    until_gone(runtime, [])
