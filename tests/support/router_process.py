"""A real router process over canned workers, for tests that talk to it on raw sockets.

The workers run on a thread of their own, so a test may block on its sockets; one process serves all
tests of a module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pdcluster_protocol.config import RouterConfig
from pdcluster_protocol.ids import Role
from support.canned import CLUSTER, MODEL, RING, Behaviour, CannedWorker, Leg, pair_of_workers

DEADLINE_SECONDS = 20.0
ROOT = Path(__file__).resolve().parents[2]
ResultT = TypeVar("ResultT")


class RouterProcess:
    """The process, its workers, and raw connections to it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self._folder = folder
        self._changes = changes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._process: subprocess.Popen[bytes]
        self.workers = pair_of_workers()
        self.port = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def legs(self) -> list[Leg]:
        """What has reached the engines."""
        return [leg for worker in self.workers for leg in worker.legs]

    def worker(self, role: Role) -> CannedWorker:
        return next(worker for worker in self.workers if worker.role is role)

    def behave(self, behaviour: Behaviour) -> None:
        """What decode does from now on."""
        self.worker(Role.DECODE).behaviour = behaviour

    def wait(self, role: Role, condition: Callable[[], bool]) -> None:
        """Wait until something has happened at a worker."""
        self._run(self.worker(role).wait_for(condition))

    def connect(self) -> RawSocket:
        return RawSocket(self.port)

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @contextlib.contextmanager
    def running(self) -> Iterator[RouterProcess]:
        """Everything up until the block ends; the router must then end by itself."""
        self._thread.start()
        try:
            for worker in self.workers:
                self._run(worker.start())
            with (self._folder / "router.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pdcluster_sidecar.router", "--config", self._config()],
                    cwd=ROOT,
                    stderr=log,
                )
            try:
                self._await_ready()
                yield self
                self._process.send_signal(signal.SIGTERM)
                assert 0 == self._process.wait(DEADLINE_SECONDS)
            finally:
                self._process.kill()
                self._process.wait()
        finally:
            for worker in self.workers:
                self._run(worker.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEADLINE_SECONDS)
            self._loop.close()

    def _config(self) -> str:
        keys = self._folder / "keys"
        keys.mkdir()
        (keys / RING.current).write_bytes(RING.key(RING.current))
        fields: dict[str, Any] = {
            "cluster": CLUSTER,
            "port": 0,
            "admin_port": 0,
            "keys_folder": str(keys),
            "served_name": MODEL,
            "max_context": 512,
            "members": tuple(worker.member for worker in self.workers),
        }
        file = self._folder / "router.json"
        file.write_bytes(msgspec.json.encode(RouterConfig(**(fields | self._changes))))
        return str(file)

    def _await_ready(self) -> None:
        self._until(lambda: b'"listening"' in self._log())
        line = next(line for line in self._log().splitlines() if b'"listening"' in line)
        self.port = json.loads(line)["port"]
        self._until(self._is_ready)

    def _is_ready(self) -> bool:
        with self.connect() as client:
            client.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            return client.answer().status == 200

    def _until(self, condition: Callable[[], bool]) -> None:
        turned = threading.Event()
        for _ in range(int(DEADLINE_SECONDS / 0.05)):
            assert self._process.poll() is None, self._log().decode(errors="replace")
            if condition():
                return
            turned.wait(0.05)
        raise AssertionError("the router is not ready: " + self._log().decode(errors="replace"))

    def _log(self) -> bytes:
        return (self._folder / "router.log").read_bytes()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_SECONDS)


class RawAnswer(msgspec.Struct, frozen=True):
    """One answer as it was read."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The reason that an error names."""
        return str(json.loads(self.body)["error"]["code"])


class RawSocket:
    """A client that sends what it is told and reads answer by answer."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_SECONDS)
        self._read = bytearray()

    def __enter__(self) -> RawSocket:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, raw: bytes) -> None:
        """Send all of it; a router that has closed meanwhile is no error."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(raw)

    def answer(self, *, bodiless: bool = False) -> RawAnswer:
        """The next answer with a length; interim ones are answers too."""
        head = self._until(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        status = int(first.split(" ")[1])
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = 0 if bodiless or status < 200 else int(headers["content-length"])
        while len(self._read) < length:
            self._more()
        return RawAnswer(status, headers, self._take(length))

    def rest(self) -> bytes:
        """Everything until the router closes."""
        with contextlib.suppress(EOFError):
            while True:
                self._more()
        return bytes(self._read)

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._read:
            self._more()
        return self._take(self._read.index(mark) + len(mark))

    def _take(self, count: int) -> bytes:
        taken = bytes(self._read[:count])
        del self._read[:count]
        return taken

    def _more(self) -> None:
        try:
            part = self.socket.recv(1 << 16)
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError(f"the router has closed behind {self._read!r}")
        self._read += part
