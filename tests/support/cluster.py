"""A whole cluster of real processes: `pdctl up --detach` in a runtime folder of its own.

    with PairCluster(model="tiny-glm", mode="exact", chunk=100) as cluster:
        ended = await cluster.generate([1, 2, 3])

Leaving the block runs `pdctl down`, and fails if any process logged a fault of its own: the engines
check their invariants after every event and end loudly when one does not hold.

Any other YAML file can be run as well (`PairCluster(spec=FILE)`), with as many pods, ranks and
routers as it has; `process`, `address`, `metrics` and `dump` mean the one engine of a role.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import yaml

from pdcluster_operator.place import resolve_source
from pdcluster_protocol.authentication import HEADER, HttpSigner
from pdcluster_protocol.ids import Role
from pdctl.control import ask_state
from pdctl.counters import Sample, parse, total
from pdctl.proc import descendants
from pdctl.processes import LOGS_FOLDER, RUN_FILE, ProcessSpec, ProcessState, RunSpec, RunState
from pdctl.web import signer
from support.ports import free_ports

SPEC = Path(__file__).parents[1] / "integration/specs/pair.yaml"
UP_SECONDS = 115.0
DOWN_SECONDS = 20.0
DEADLINE_SECONDS = 60.0
TIMEOUT = aiohttp.ClientTimeout(total=110)
TOPS = 5
"""Top logprobs that every request asks for."""


class Ended(msgspec.Struct, frozen=True):
    """The one end of a request as its client saw it."""

    status: int
    """HTTP status; 0 when the connection broke instead."""
    ids: list[int]
    """Tokens seen, in a stream also those before an error."""
    tops: list[list[tuple[float, int]]]
    """Top logprobs of each token: (logprob, id), likeliest first."""
    error: dict[str, Any] | None = None
    done: bool = False
    """It ended well: a whole answer, or a stream with its end."""
    ends: int = 1
    """How many ends it had: 0 where a stream broke off."""

    @property
    def clear(self) -> bool:
        """Exactly one end: well, or with an error that names its reason and its leg."""
        if self.error is None:
            return self.done and self.ends == 1
        named = self.error["message"] and self.error["code"] and self.error.get("leg")
        return bool(named) and not self.done and self.ends == 1


class PairCluster:
    """The processes of one YAML file; every method may be used while they die.

    Without a model the file's own model, mode and chunk size are left as they are.
    """

    def __init__(
        self, *, model: str = "", mode: str = "batched", chunk: int = 256, spec: Path = SPEC
    ) -> None:
        self.model, self.mode, self.chunk = model, mode, chunk
        self._source = spec
        self._runtime = tempfile.TemporaryDirectory(prefix="pd")
        self._environment = os.environ | {
            "XDG_RUNTIME_DIR": self._runtime.name,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._signer: HttpSigner
        self.run: RunSpec

    # --- its life -------------------------------------------------------------------------------

    def __enter__(self) -> PairCluster:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        faults = self.faults()
        left = self._down()
        if error is None:
            assert not faults, "\n".join(faults)
            assert [] == left, "files are left of the run"

    def _up(self) -> None:
        path = Path(self._runtime.name) / "spec.yaml"
        path.write_text(yaml.safe_dump(self._spec()))
        port, admin_port = free_ports()
        up = self._pdctl(
            "up", "-f", str(path), "--detach", "--port", port, "--admin-port", admin_port,
            seconds=UP_SECONDS,
        )  # fmt: skip
        assert 0 == up.returncode, f"{up.stdout}\n{up.stderr}\n{self.logs()}"
        path.unlink()
        [folder] = Path(self._runtime.name).glob("pdcluster/slot-*/")
        self.run = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=RunSpec)
        self._signer = signer(folder / "keys")

    def _down(self) -> list[Path]:
        """End everything; what is left of its files."""
        self._pdctl("down", seconds=DOWN_SECONDS)
        left = [path for path in Path(self._runtime.name).rglob("*") if path.name != "spec.yaml"]
        self._runtime.cleanup()
        return left

    def _pdctl(self, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pdctl", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = yaml.safe_load(self._source.read_text())
        model = spec["spec"]["model"]
        model["source"] = resolve_source(model["source"], str(self._source.resolve().parent))
        if self.model:
            model["source"] = f"builtin://{self.model}"
        for role in ("prefill", "decode"):
            arguments = spec["spec"][role].setdefault("args", [])
            if self.model:
                arguments += [f"--mode={self.mode}", f"--chunk={self.chunk}"]
            if "--check-invariants" not in arguments:
                arguments.append("--check-invariants")
        return spec

    # --- its processes --------------------------------------------------------------------------

    def state(self) -> RunState:
        """All processes as the supervisor sees them."""
        return ask_state(Path(self.run.folder))

    def specs(self, kind: str) -> list[ProcessSpec]:
        """All processes of one kind: `router`, `sidecar`, `engine`."""
        return [process for process in self.run.processes if process.kind == kind]

    def process(self, name: str) -> ProcessState:
        """One process as the supervisor sees it: `prefill/engine`, `decode/sidecar`, ..."""
        role, _, kind = name.partition("/")
        [wanted] = [p.name for p in self.run.processes if (p.role, p.kind) == (role, kind)]
        return next(process for process in self.state().processes if process.name == wanted)

    def transfer_pid(self, role: Role) -> int:
        """The transfer process: the one child of the role's engine."""
        [pid] = descendants(self.process(f"{role}/engine").pid)[1:]
        return pid

    def logs(self) -> str:
        """All logs of the run."""
        files = sorted(Path(self._runtime.name).glob(f"pdcluster/*/{LOGS_FOLDER}/*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in files)

    def faults(self) -> list[str]:
        """Log lines that only a fault of ours writes; a neighbour's death is none."""
        words = ('"level": "critical"', "Traceback", '"http_failed"')
        return [line for line in self.logs().splitlines() if any(word in line for word in words)]

    # --- asking it ------------------------------------------------------------------------------

    def address(self, role: Role, kind: str) -> str:
        """Base URL of a role's engine or sidecar."""
        [url] = [p.ready_url for p in self.run.processes if (p.role, p.kind) == (role, kind)]
        return url.rpartition("/")[0]

    async def metrics(self, role: Role | None = None) -> dict[str, float]:
        """Metrics of a role's engine, or of the router."""
        url = self.run.admin if role is None else self.address(role, "engine")
        status, raw = await _exchange("GET", f"{url}/metrics")
        assert 200 == status
        lines = raw.decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    async def count(self, kind: str, name: str, /, **labels: str) -> int:
        """The sum of a metric over all processes of a kind."""
        return total(await self._samples(kind), name, **labels)

    async def _samples(self, kind: str) -> list[Sample]:
        """The metrics of all engines or of all routers."""
        urls = [_metrics_url(process) for process in self.specs(kind)]
        answers = await asyncio.gather(*(_exchange("GET", url) for url in urls))
        return [sample for _, raw in answers for sample in parse(raw.decode())]

    async def dump(self, role: Role) -> dict[str, Any]:
        """What the role's engine tells of itself; empty while its sidecar gets no answer."""
        ranks = (await self.ask(self.address(role, "sidecar")))["ranks"]
        return (ranks and ranks[0]["engine"]) or {}

    async def dumps(self, role: Role | None = None) -> list[dict[str, Any]]:
        """What every rank of every pod tells of itself; an empty one tells nothing now."""
        pods = [process for process in self.specs("sidecar") if role in {None, process.role}]
        urls = [process.ready_url.rpartition("/")[0] for process in pods]
        dumps = await asyncio.gather(*map(self.ask, urls))
        return [
            rank["engine"] or {} for dump in dumps for rank in dump["ranks"] or [{"engine": {}}]
        ]

    async def ask(self, url: str, target: str = "/pd/v1/dump") -> dict[str, Any]:
        """What a sidecar, or a router's admin port, answers to a signed question."""
        headers = {HEADER: self._signer.sign("GET", target, b"", authority=urlsplit(url).netloc)}
        _, raw = await _exchange("GET", url + target, headers=headers)
        answer: dict[str, Any] = json.loads(raw)
        return answer

    async def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """One plain request to the router, answered with JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = await _exchange("POST", self.run.endpoint + path, raw)
        return status, json.loads(answer)

    async def ready(self) -> bool:
        """Whether every process serves."""
        for process in self.run.processes:
            if process.ready_url:
                try:
                    status, _ = await _exchange("GET", process.ready_url)
                except (OSError, aiohttp.ClientError):
                    return False
                if status != 200:
                    return False
        return True

    async def idle(self) -> bool:
        """Whether nothing is left of any request in any process."""
        routers, engines, dumps = await asyncio.gather(
            self._samples("router"), self._samples("engine"), self.dumps()
        )
        busy = [
            *(total(routers, f"pdcluster_{name}") for name in ("in_flight", "queue_depth")),
            *(
                total(engines, "pdcluster_queue", queue=queue)
                for queue in ("rooms", "waiting", "running")
            ),
            *(total(engines, "pdcluster_pages", state=state) for state in ("owned", "quarantined")),
        ]
        return not any(busy) and all(map(_nothing_left, dumps))

    async def wait_idle(self) -> None:
        """Until nothing is left of any request."""
        await until(self.idle, "idle")

    # --- requests -------------------------------------------------------------------------------

    def body(self, ids: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
        """A greedy `/generate` that runs on to exactly `tokens` tokens."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return {
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": TOPS,
            **fields,
        }

    async def alone(self, ids: list[int], tokens: int, **fields: Any) -> Ended:
        """What one decode engine answers by itself, without a peer."""
        url = next(p for p in self.specs("engine") if p.role == Role.DECODE).ready_url
        raw = json.dumps(self.body(ids, tokens, **fields)).encode()
        authority = urlsplit(url).netloc
        headers = {HEADER: self._signer.sign("POST", "/generate", raw, authority=authority)}
        url = url.replace("/health", "/generate")
        status, answer = await _exchange("POST", url, raw, headers=headers)
        assert 200 == status, answer
        return _ended(status, json.loads(answer), done=True)

    async def generate(self, ids: list[int], tokens: int, **fields: Any) -> Ended:
        """One whole answer; a broken connection is an end too, and not a clear one."""
        try:
            status, answer = await self.post("/generate", self.body(ids, tokens, **fields))
        except aiohttp.ClientError:
            return Ended(0, [], [], ends=0)
        if status != 200:
            return Ended(status, [], [], error=answer["error"])
        return _ended(status, answer, done=True)

    async def stream(self, ids: list[int], tokens: int, *, leave_after: int = 0) -> Ended:
        """One streamed answer; with `leave_after` the client leaves after so many events.

        Without logprobs: every event repeats all so far, and their encoding would be the load.
        """
        seen = Ended(0, [], [], ends=0)
        count = 0
        body = self.body(ids, tokens, stream=True, return_logprob=False, top_logprobs_num=0)
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            try:
                async with session.post(f"{self.run.endpoint}/generate", json=body) as answer:
                    if answer.status != 200:
                        return Ended(answer.status, [], [], error=(await answer.json())["error"])
                    async for line in answer.content:
                        if line.startswith(b"data: "):
                            seen = _seen(seen, line.removeprefix(b"data: ").strip())
                            count += 1
                        if count == leave_after > 0:
                            answer.close()
                            break
            except aiohttp.ClientError:
                return msgspec.structs.replace(seen, ends=0)
        return seen


def _metrics_url(process: ProcessSpec) -> str:
    if process.kind == "engine":
        return process.ready_url.replace("/health", "/metrics")
    host, admin_port = process.ports[0].rpartition(":")[0], process.ports[1]
    return f"http://{host}:{admin_port}/metrics"


def _nothing_left(dump: dict[str, Any]) -> bool:
    """Whether a rank answered, and has no room, leg or sequence."""
    if not dump:
        return False
    return not any([dump["rooms"], dump["queued"], dump["legs"], *dump["compute"].values()])


def _seen(before: Ended, payload: bytes) -> Ended:
    """What a client knows after one more event."""
    if payload == b"[DONE]":
        return msgspec.structs.replace(before, done=True, ends=before.ends + 1)
    event = json.loads(payload)
    if "error" in event:
        return msgspec.structs.replace(before, error=event["error"], ends=before.ends + 1)
    return msgspec.structs.replace(_ended(200, event), ends=before.ends)


def _ended(status: int, answer: dict[str, Any], *, done: bool = False) -> Ended:
    tops = [
        [(logprob, token) for logprob, token, _ in step]
        for step in answer["meta_info"].get("output_top_logprobs", ())
    ]
    return Ended(status, answer["output_ids"], tops, done=done)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Ask again and again, with a deadline."""
    turned = asyncio.Event()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await condition():
                turned.clear()
                asyncio.get_running_loop().call_later(0.03, turned.set)
                await turned.wait()
    except TimeoutError:
        raise AssertionError(f"not {what} within {DEADLINE_SECONDS} s") from None


async def _exchange(
    method: str, url: str, body: bytes = b"", *, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.request(method, url, data=io.BytesIO(body), headers=headers) as answer,
    ):
        return answer.status, await answer.read()
