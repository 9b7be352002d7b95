"""The in-process transport against a scripted library: its end, and what happens without one."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcluster_engine.memory.window import ArenaMemory, HostWindow
from pdcluster_engine.transport import mooncake
from pdcluster_engine.transport.contact import Alarm
from pdcluster_engine.transport.inprocess import RETIRED_PORTS_MAX, InProcessTransport, RetiredPorts
from pdcluster_engine.transport.install import check_device_wheel
from pdcluster_engine.transport.mooncake import MooncakeAdapter, Settings
from pdcluster_engine.transport.open import open_in_process
from pdcluster_engine.transport.port import (
    Completed,
    Deadlines,
    Died,
    DigestRequest,
    Fenced,
    Ready,
    WriteRequest,
)
from pdcluster_protocol.errors import ConfigError, TransportError
from support.arenas import Side, open_descriptors

NBYTES = 1 << 16
BASE = 1 << 45
PEER = "127.64.2.9:15000"
SETTINGS = Settings(
    host="127.64.2.1", port_min=15000, port_max=15031, deadlines=Deadlines(base_seconds=0.1)
)


class ScriptedLibrary:
    """One engine of the library: notes its calls, hangs where a test wants it to."""

    def __init__(self, calls: list[str], hang: threading.Event | None) -> None:
        self.calls = calls
        self._hang = hang

    def initialize(self, *_: str) -> int:
        self.calls.append("initialize")
        return 0

    def register_memory(self, address: int, nbytes: int) -> int:
        self.calls.append(f"register {address - BASE} {nbytes}")
        return 0

    def unregister_memory(self, address: int) -> int:
        self.calls.append(f"unregister {address - BASE}")
        return 0

    def get_rpc_port(self) -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    def batch_transfer_async_write(self, *_: object) -> int:
        self.calls.append("write")
        if self._hang is not None:
            assert self._hang.wait(30)
        return 1

    def transfer_check_status(self, _batch: int) -> int:
        return 1

    def __del__(self) -> None:
        self.calls.append("destroyed")


class BrokenWindow(HostWindow):
    """Raises what a broken device raises."""

    def digest(self, offset: int, nbytes: int, *, pieces: int = 1, stride: int = 0) -> int:
        raise RuntimeError("illegal access")


class Bench:
    """A transport over ordinary memory whose library is scripted."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        end_seconds: float = 20.0,
        window: type[HostWindow] = HostWindow,
    ) -> None:
        self.calls: list[str] = []
        self.hang: threading.Event | None = None
        monkeypatch.setattr(MooncakeAdapter, "_load", lambda _: self._library())
        # The alarm of a transfer process would end the engine.
        monkeypatch.setattr(Alarm, "__enter__", lambda _: self.calls.append("alarm"))
        monkeypatch.setattr(mooncake, "check_machine", lambda _: "0.3.14")
        self.bytes = memoryview(mmap.mmap(-1, NBYTES))
        memory = ArenaMemory(address=BASE, nbytes=NBYTES, window=window(self.bytes))
        self.transport = InProcessTransport(SETTINGS, memory, end_seconds=end_seconds)
        self.side = Side(self.transport, -1, NBYTES)

    def _library(self) -> ScriptedLibrary:
        return ScriptedLibrary(self.calls, self.hang)

    def write(self, operation: int) -> None:
        self.transport.submit(WriteRequest(operation, PEER, 0, BASE, 64, digest=True))


NewBench = Callable[..., Bench]


@pytest.fixture
def new_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[NewBench]:
    made: list[Bench] = []

    def new(**options: Any) -> Bench:
        made.append(Bench(monkeypatch, **options))
        return made[-1]

    yield new
    for bench in made:
        if bench.hang is not None:
            bench.hang.set()
        bench.transport.close()


def test_the_whole_arena_is_registered_once_and_its_address_published(new_bench: NewBench) -> None:
    bench = new_bench()
    bench.transport.start()
    ready = bench.side.wait(Ready)
    assert (BASE, "0.3.14", 1) == (ready.base_address, ready.version, ready.generation)
    assert ["initialize", f"register 0 {NBYTES}"] == bench.calls
    bench.write(1)
    bench.transport.submit(DigestRequest(2, 0, 64))
    done = bench.side.wait_completed(2)
    assert [True, True] == [done[1].ok, done[2].ok]
    assert done[1].digest == done[2].digest == HostWindow(bench.bytes).digest(0, 64)
    assert ["write"] == bench.calls[2:]


def test_pieces_are_written_one_by_one_and_hashed_together(new_bench: NewBench) -> None:
    bench = new_bench()
    bench.bytes[:] = bytes(range(256)) * (NBYTES // 256)
    bench.transport.start()
    bench.side.wait(Ready)
    bench.transport.submit(WriteRequest(1, PEER, 3, BASE, 5, True, 4, 100, 5))
    bench.transport.submit(DigestRequest(2, 3, 5, 4, 100))
    done = bench.side.wait_completed(2)
    expected = HostWindow(bench.bytes).digest(3, 5, pieces=4, stride=100)
    assert [expected, expected] == [done[1].digest, done[2].digest]
    assert 4 == bench.calls.count("write")


def test_a_fence_is_told_only_after_the_library_is_destroyed(new_bench: NewBench) -> None:
    bench = new_bench()
    bench.transport.start()
    bench.side.wait(Ready)
    bench.transport.fence()
    assert 1 == bench.side.wait(Fenced).generation
    assert ["unregister 0", "destroyed"] == bench.calls[2:4]
    assert 2 == bench.side.wait(Ready).generation


def test_what_was_submitted_before_a_fence_never_completes_after_it(new_bench: NewBench) -> None:
    bench = new_bench()
    bench.hang = threading.Event()
    bench.transport.start()
    bench.side.wait(Ready)
    bench.write(1)
    bench.transport.fence()
    bench.write(2)
    bench.hang.set()
    bench.side.wait(Fenced)
    bench.side.wait(Ready)
    bench.write(3)
    assert 3 == bench.side.wait(Completed).operation


def test_a_library_that_does_not_come_back_ends_the_transport_for_good(
    new_bench: NewBench,
) -> None:
    bench = new_bench(end_seconds=0.05)
    bench.hang = threading.Event()
    bench.transport.start()
    bench.side.wait(Ready)
    bench.write(1)
    bench.transport.fence()
    died = bench.side.wait(Died)
    assert died.final
    assert "did not end within 0.05 s" in died.detail
    assert not [event for event in bench.side.seen if isinstance(event, Fenced)]
    with pytest.raises(TransportError, match="has ended"):
        bench.write(2)
    bench.hang.set()


def test_a_device_that_cannot_be_read_ends_the_transport_for_good(new_bench: NewBench) -> None:
    bench = new_bench(window=BrokenWindow)
    bench.transport.start()
    bench.side.wait(Ready)
    bench.transport.submit(DigestRequest(1, 0, 64))
    died = bench.side.wait(Died)
    assert (True, "the device failed: illegal access") == (died.final, died.detail)


def test_an_rdma_without_an_adapter_is_final(new_bench: NewBench) -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("this machine may have an adapter")
    memory = ArenaMemory(address=BASE, nbytes=NBYTES, window=HostWindow(new_bench().bytes))
    with pytest.raises(ConfigError, match="no adapter"):
        open_in_process(memory, host="127.64.2.1", port_min=15000, port_max=15031, protocol="rdma")


def test_closing_destroys_the_library_and_leaves_no_descriptor(new_bench: NewBench) -> None:
    before = open_descriptors()
    bench = new_bench()
    bench.transport.start()
    bench.side.wait(Ready)
    bench.transport.close()
    assert "destroyed" == bench.calls[-1]
    assert before == open_descriptors()
    bench.transport.close()


def test_the_port_of_an_ended_session_stays_taken_for_some_generations() -> None:
    retired = RetiredPorts()
    retired.add("")
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
    retired.add(f"127.64.2.1:{port}")
    with socket.socket() as late, pytest.raises(OSError, match="in use"):
        late.bind(("0.0.0.0", port))
    with socket.socket() as peer:
        assert 0 != peer.connect_ex(("127.64.2.1", port))
    for _ in range(RETIRED_PORTS_MAX):
        with socket.create_server(("0.0.0.0", 0)) as server:
            retired.add(f"127.64.2.1:{server.getsockname()[1]}")
    with socket.socket() as late:
        late.bind(("0.0.0.0", port))
    retired.close()
    retired.add(f"127.64.2.1:{port}")


def test_the_wheel_without_cuda_is_refused_for_device_memory(tmp_path: Path) -> None:
    check_device_wheel([str(tmp_path)])
    (tmp_path / "mooncake_transfer_engine_cuda13-0.3.14.dist-info").mkdir()
    check_device_wheel([str(tmp_path)])
    (tmp_path / "mooncake_transfer_engine_non_cuda-0.3.13.post1.dist-info").mkdir()
    with pytest.raises(ConfigError, match=r"pip install 'pdcluster\[mooncake-cuda13\]'"):
        check_device_wheel([str(tmp_path)])
