"""Real sidecar processes on loopback addresses, and engines that only speak the link."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from pdcluster_protocol.authentication import HEADER, HttpSigner, HttpVerifier, KeyRing
from pdcluster_protocol.codec import FrameReader, engine_to_sidecar, frame, sidecar_to_engine
from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.messages import (
    EngineHello,
    EngineToSidecar,
    HelloAnswer,
    Load,
    Pulse,
    SidecarToEngine,
)
from pdcluster_protocol.topology import RankCoordinate
from support.ports import fresh_host

KEY = b"0123456789abcdef0123456789abcdef"
RING = KeyRing({"k1": KEY})
LAYOUT = KVLayout(64, "bfloat16", (Region(0, "key", 128), Region(0, "value", 128)))
DEADLINE_SECONDS = 20.0
ROOTS = ("protocol", "sidecar", "operator", "engine")
REPOSITORY = Path(__file__).resolve().parents[2]
_sessions = itertools.count(1)

MessageT = TypeVar("MessageT")


class FakeEngine:
    """One rank's end of the link."""

    def __init__(self, config: SidecarConfig, **changes: Any) -> None:
        self.config = config
        self.hello = hello_of(config, **changes)
        self.answer: HelloAnswer | None = None
        self.loops = 0
        self.rooms = 0
        self.draining = False
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._frames = FrameReader()
        self._inbox: list[SidecarToEngine] = []
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self.closed = asyncio.Event()

    @property
    def address(self) -> RankAddress:
        assert self.answer is not None
        return self.answer.address

    async def open(self) -> HelloAnswer:
        """Connect and say hello."""
        self._reader, self._writer = await asyncio.open_unix_connection(self.config.link_path)
        self.send(self.hello)
        self._tasks.append(asyncio.create_task(self._read()))
        self.answer = await self.receive(HelloAnswer)
        if not self.answer.refused:
            self._tasks.append(asyncio.create_task(self._pulse()))
        return self.answer

    def send(self, message: EngineToSidecar) -> None:
        self._writer.write(frame(engine_to_sidecar.encode(message)))

    async def receive(
        self, kind: type[MessageT], where: Callable[[MessageT], bool] = lambda _: True
    ) -> MessageT:
        """The next message of this kind; others stay for later."""

        def find() -> MessageT | None:
            for index, message in enumerate(self._inbox):
                if isinstance(message, kind) and where(message):
                    del self._inbox[index]
                    return message
            return None

        async with asyncio.timeout(DEADLINE_SECONDS), self._changed:
            while True:
                found = find()
                if found is not None:
                    return found
                await self._changed.wait()

    def has(self, kind: type[SidecarToEngine], like: SidecarToEngine | None = None) -> bool:
        found = [message for message in self._inbox if isinstance(message, kind)]
        return bool(found) if like is None else like in found

    def pulse(self, *, draining: bool, rooms: int = 0) -> None:
        """Say at once, and from now on, whether it drains and how many rooms it has."""
        self.draining, self.rooms = draining, rooms
        self._say_pulse()

    def hang(self) -> None:
        """Keep the link, but let the loop counter stand still."""
        self._tasks[-1].cancel()

    async def die(self) -> None:
        """Close the link, as the kernel does for a killed process."""
        for task in self._tasks:
            task.cancel()
        self._writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        # A sidecar that is killed with words of ours unread resets the link instead of ending it.
        with contextlib.suppress(ConnectionResetError):
            while chunk := await self._reader.read(65536):
                async with self._changed:
                    self._inbox += map(sidecar_to_engine.decode, self._frames.feed(chunk))
                    self._changed.notify_all()
        self.closed.set()

    async def _pulse(self) -> None:
        while True:
            self._say_pulse()
            await _turn(0.2)

    def _say_pulse(self) -> None:
        self.loops += 1
        load = Load(pages_free=7, rooms_open=self.rooms)
        self.send(Pulse(self.loops, load, self.rooms, self.draining))


def hello_of(config: SidecarConfig, **changes: Any) -> EngineHello:
    """What a fitting rank says."""
    fields: dict[str, Any] = {
        "instance": config.instance,
        "role": config.role,
        "coordinate": RankCoordinate(),
        "parallel": config.parallel,
        "layout": LAYOUT,
        "incarnation": "",
        "session": f"engine-{next(_sessions)}",
        "http_port": config.engine_http_port,
        "fingerprint": config.fingerprint,
        "allocation": config.allocation,
        "served_name": "tiny",
        "max_context": 4096,
        "page_count": 64,
        "tokenizer_digest": "t1",
        "tokenizer_files": {"tokenizer.json": b"{}"},
    }
    return EngineHello(**(fields | changes))


class SidecarProcess:
    """One `python -m pdcluster_sidecar`."""

    def __init__(self, folder: Path, role: Role, **changes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        keys = folder / "keys"
        keys.mkdir(exist_ok=True)
        (keys / "k1").write_bytes(changes.pop("key", KEY))
        fields: dict[str, Any] = {
            "cluster": "c",
            "instance": f"c-{role}-0",
            "role": role,
            "host": fresh_host(),
            "link_path": str(folder / "link"),
            "keys_folder": str(keys),
            "fingerprint": "f",
        }
        self.config = SidecarConfig(**(fields | changes))
        self.file = folder / "sidecar.json"
        self.file.write_bytes(msgspec.json.encode(self.config))
        self.log = folder / "log"
        self.signer = HttpSigner(RING, os.urandom(8).hex())
        self._process: asyncio.subprocess.Process | None = None

    @property
    def http(self) -> RankAddress:
        return RankAddress(self.config.host, self.config.http_port)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start, and wait until it answers."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)
        }
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pdcluster_sidecar",
                "--config",
                str(self.file),
                stderr=log,
                stdout=log,
                env=environment,
            )
        await until(self._answers)

    async def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, self.log.read_text()
        try:
            status, _ = await self.call("GET", "/health")
        except aiohttp.ClientError:
            return False
        return status == 200

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal and wait; gives the exit status."""
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            process.send_signal(number)
        async with asyncio.timeout(DEADLINE_SECONDS):
            status = await process.wait()
        self._process = None
        return status

    async def call(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        signed: bool = False,
        header: str | None = None,
    ) -> tuple[int, bytes]:
        """One HTTP call, on a connection of its own."""
        headers = {}
        if signed:
            header = self.signer.sign(method, target, body, authority=str(self.http))
        if header is not None:
            headers[HEADER] = header
        url = URL(f"http://{self.http}{target}", encoded=True)
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as client,
            client.request(method, url, data=io.BytesIO(body), headers=headers) as answer,
        ):
            raw = await answer.read()
            if target == "/pd/v1/hello" and answer.status == 200 and headers:
                HttpVerifier(RING).verify_answer(answer.headers.get(HEADER), headers[HEADER], raw)
            return answer.status, raw

    async def metric(self, name: str) -> float:
        """The value of one line of /metrics."""
        _, raw = await self.call("GET", "/metrics")
        for line in raw.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split(" ")[1])
        return 0.0

    async def wait_metric(self, name: str, value: float) -> None:
        """Wait until a counter or gauge has this value."""

        async def reached() -> bool:
            return await self.metric(name) == value

        await until(reached)


@asynccontextmanager
async def running(*sidecars: SidecarProcess) -> AsyncIterator[None]:
    """Start them, and end them whatever happens."""
    try:
        await asyncio.gather(*(sidecar.start() for sidecar in sidecars))
        yield
    finally:
        await asyncio.gather(*(sidecar.stop(signal.SIGKILL) for sidecar in sidecars))


async def until(condition: Callable[[], Any]) -> None:
    """Ask again and again, with a deadline."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():
            await _turn(0.02)


async def _turn(seconds: float) -> None:
    turned = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, turned.set)
    await turned.wait()
