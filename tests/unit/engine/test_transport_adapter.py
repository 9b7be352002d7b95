"""The Mooncake adapter against a scripted library: windows, ids, refusals, the wedge."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from pdcluster_engine.transport import mooncake
from pdcluster_engine.transport.flights import WRITE_BYTES
from pdcluster_engine.transport.install import FabricProtocol
from pdcluster_engine.transport.mooncake import CannotContinue, MooncakeAdapter, Settings
from pdcluster_engine.transport.port import WriteRequest
from pdcluster_protocol.errors import TransportError

ARENA = 1 << 20
BASE = 1 << 44
PEER = "127.64.1.2:15000"


class ScriptedLibrary:
    """What the adapter calls, with every operation waiting until the test ends it."""

    def __init__(self, *, initialize: int = 0, register: int = 0) -> None:
        self._codes = (initialize, register)
        self.handed: list[tuple[str, list[int], list[int], list[int]]] = []
        self.status: dict[int, int] = {}
        self.asked_after_end: list[int] = []
        self._ended: set[int] = set()
        self.refuse = False

    def initialize(self, *_: str) -> int:
        return self._codes[0]

    def register_memory(self, _address: int, _nbytes: int) -> int:
        return self._codes[1]

    def get_rpc_port(self) -> int:
        return 15007

    def batch_transfer_async_write(
        self, target: str, sources: list[int], destinations: list[int], sizes: list[int]
    ) -> int:
        self.handed.append((target, sources, destinations, sizes))
        if self.refuse:
            return 0
        batch = len(self.handed)
        self.status[batch] = 0
        return batch

    def transfer_check_status(self, batch: int) -> int:
        if batch in self._ended:
            self.asked_after_end.append(batch)
        if self.status[batch] in {1, -1}:
            self._ended.add(batch)
        return self.status[batch]


@pytest.fixture
def library() -> ScriptedLibrary:
    return ScriptedLibrary()


@pytest.fixture
def adapter(library: ScriptedLibrary, monkeypatch: pytest.MonkeyPatch) -> MooncakeAdapter:
    made = new_adapter(library, monkeypatch)
    made.start()
    return made


def new_adapter(
    library: ScriptedLibrary,
    monkeypatch: pytest.MonkeyPatch,
    *,
    host: str = "127.64.1.1",
    protocol: FabricProtocol = "tcp",
) -> MooncakeAdapter:
    monkeypatch.setattr(MooncakeAdapter, "_load", lambda _: library)
    monkeypatch.setattr(mooncake, "check_machine", lambda _: "0.3.13.post1")
    settings = Settings(host=host, port_min=15000, port_max=15031, protocol=protocol)
    return MooncakeAdapter(settings, arena_address=BASE, arena_nbytes=ARENA)


def write(
    operation: int, target: str = PEER, *, offset: int = 0, nbytes: int = 4096
) -> WriteRequest:
    return WriteRequest(operation, target, offset, 1 << 40, nbytes, False)


def strided(operation: int, *, pieces: int) -> WriteRequest:
    return WriteRequest(operation, PEER, 100, 1 << 40, 256, False, pieces, 1024, 300)


def test_no_call_reaches_the_library_before_its_start(
    library: ScriptedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = new_adapter(library, monkeypatch)
    with pytest.raises(TransportError, match="NEW"):
        adapter.submit(write(1))
    with pytest.raises(TransportError, match="NEW"):
        adapter.poll()
    assert (f"127.64.1.1:{15007}", "0.3.13.post1") == adapter.start()
    with pytest.raises(TransportError, match="STARTED"):
        adapter.start()


def test_an_ipv6_session_name_has_brackets(
    library: ScriptedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "[fd00::1]:15007" == new_adapter(library, monkeypatch, host="fd00::1").start()[0]


@pytest.mark.parametrize(("initialize", "register"), [(-1, 0), (0, -7)])
def test_a_failed_start_leaves_an_adapter_that_takes_nothing(
    initialize: int, register: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ScriptedLibrary(initialize=initialize, register=register)
    adapter = new_adapter(library, monkeypatch)
    with pytest.raises(TransportError, match="Mooncake"):
        adapter.start()
    with pytest.raises(TransportError, match="BROKEN"):
        adapter.poll()


def test_operations_are_single_and_the_windows_hold(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    peers = [f"127.64.1.{i}:15000" for i in range(2, 8)]
    for number in range(40 * len(peers)):
        adapter.submit(write(number, peers[number // 40], nbytes=64 << 10))
    assert [] == adapter.poll()
    handed = [target for target, *_ in library.handed]
    assert 64 == len(handed)
    assert 16 >= max(handed.count(peer) for peer in peers)
    assert all(
        [1, 1, 1] == [len(part) for part in (sources, destinations, sizes)]
        for _, sources, destinations, sizes in library.handed
    )
    assert 240 == adapter.outstanding


def test_pieces_are_single_writes_and_their_window_holds(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    adapter.submit(strided(1, pieces=1000))
    adapter.submit(write(2))
    handed = 0
    while handed < 1000:
        assert [] == adapter.poll()
        assert 64 >= len(library.handed) - handed
        handed = len(library.handed)
        library.status = dict.fromkeys(library.status, 1)
    assert [1, 2] == [completed.operation for completed in adapter.poll() + adapter.poll()]
    assert [(PEER, [BASE + 100 + i * 1024], [(1 << 40) + i * 300], [256]) for i in range(1000)] == (
        library.handed[:1000]
    )
    assert [] == library.asked_after_end
    assert 0 == adapter.outstanding


def test_an_operation_is_ok_only_when_its_last_piece_is(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    adapter.submit(strided(1, pieces=3))
    adapter.poll()
    library.status |= {1: 1, 3: 1}
    assert [] == adapter.poll()
    library.status[2] = 1
    assert [(1, True)] == [(c.operation, c.ok) for c in adapter.poll()]


def test_a_failed_piece_ends_its_operation_once_nothing_of_it_flies(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    adapter.submit(strided(1, pieces=1000))
    adapter.submit(write(2))
    adapter.poll()
    library.status[5] = -1
    assert [] == adapter.poll()
    library.status |= {batch: 1 for batch in range(1, 65) if batch != 5}
    (failed,) = adapter.poll()
    assert (1, False) == (failed.operation, failed.ok)
    assert "one of 1000 pieces of 256 bytes" in failed.detail
    assert [64 + 1] == [len(library.handed)]
    library.status[65] = 1
    assert [(2, True)] == [(c.operation, c.ok) for c in adapter.poll()]


def test_a_long_piece_is_cut_for_tcp_and_never_by_a_network_adapter(
    library: ScriptedLibrary, adapter: MooncakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 3 * WRITE_BYTES + 5
    request = WriteRequest(1, PEER, 7, 1 << 40, nbytes, False)
    adapter.submit(request)
    adapter.poll()
    sizes = [size for *_, (size,) in library.handed]
    assert (3, nbytes) == (len(sizes), sum(sizes))
    places = [sum(sizes[:i]) for i in range(3)]
    assert [
        (PEER, [BASE + 7 + at], [(1 << 40) + at], [sizes[i]]) for i, at in enumerate(places)
    ] == (library.handed)
    whole = new_adapter(library, monkeypatch, protocol="rdma")
    whole.start()
    whole.submit(request)
    whole.poll()
    assert (PEER, [BASE + 7], [1 << 40], [nbytes]) == library.handed[3]
    assert 4 == len(library.handed)


def test_while_a_peer_fails_no_operation_flies_twice_and_none_is_lost(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    for number in range(1, 21):
        adapter.submit(write(number, nbytes=ARENA))
    assert [] == adapter.poll()
    assert 16 == len(library.handed)
    library.status = dict.fromkeys(library.status, -1)
    # The first operation has had four writes in flight, as three more.
    assert [1, 2, 3, 4] == sorted(completed.operation for completed in adapter.poll())
    assert 16 + 16 == len(library.handed)
    assert [BASE] == list(dict.fromkeys(place for _, (place,), *_ in library.handed[16:]))
    library.status = {batch: status or -1 for batch, status in library.status.items()}
    adapter_ended = adapter.poll()
    assert list(range(5, 21)) == [completed.operation for completed in adapter_ended]
    assert 0 == adapter.outstanding


def test_a_peer_that_recovers_gets_the_rest_of_every_operation(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    for number in range(1, 6):
        adapter.submit(write(number, nbytes=ARENA))
    adapter.poll()
    library.status |= dict.fromkeys(range(1, 5), -1)
    assert [1] == [completed.operation for completed in adapter.poll()]
    ended: dict[int, bool] = {}
    while adapter.outstanding:
        library.status = {batch: status or 1 for batch, status in library.status.items()}
        ended |= {completed.operation: completed.ok for completed in adapter.poll()}
    assert dict.fromkeys((2, 3, 4, 5), True) == ended
    written = sorted(place for _, (place,), *_ in library.handed)
    parts = ARENA // WRITE_BYTES
    assert sorted(BASE + part * WRITE_BYTES for part in range(parts) for _ in range(5)) == written
    assert [] == library.asked_after_end


def test_every_operation_ends_once_and_no_ended_id_is_asked_again(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    for number in range(100):
        adapter.submit(write(number))
    ended: list[int] = []
    while adapter.outstanding:
        ended += [completed.operation for completed in adapter.poll()]
        for batch, status in library.status.items():
            library.status[batch] = status or (-1 if batch % 3 == 0 else 1)
    assert list(range(100)) == sorted(ended)
    assert [] == library.asked_after_end


def test_a_refused_hand_over_is_a_named_failure(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    library.refuse = True
    adapter.submit(write(1))
    (completed,) = adapter.poll()
    assert (1, False) == (completed.operation, completed.ok)
    assert PEER in completed.detail
    assert 0 == adapter.outstanding


def test_a_source_outside_the_arena_never_reaches_the_library(
    library: ScriptedLibrary, adapter: MooncakeAdapter
) -> None:
    adapter.submit(write(1, offset=ARENA - 4095))
    (completed,) = adapter.poll()
    assert not completed.ok
    assert [] == library.handed


@pytest.mark.parametrize("status", [-2, 5])
def test_an_unknown_status_ends_the_process(
    library: ScriptedLibrary, adapter: MooncakeAdapter, status: int
) -> None:
    adapter.submit(write(1))
    adapter.poll()
    library.status[1] = status
    with pytest.raises(CannotContinue, match="stalled"):
        adapter.poll()
    with pytest.raises(TransportError, match="BROKEN"):
        adapter.poll()


def test_an_expired_deadline_ends_the_process(
    adapter: MooncakeAdapter, clock: Callable[[float], None]
) -> None:
    adapter.submit(write(1))
    adapter.poll()
    clock(14.9)
    assert [] == adapter.poll()
    clock(0.2)
    with pytest.raises(CannotContinue, match="stalled"):
        adapter.poll()


def test_three_failures_after_one_second_by_a_peer_that_accepts_are_the_wedge(
    library: ScriptedLibrary, adapter: MooncakeAdapter, clock: Callable[[float], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        fail_after(1.0, target, adapter, library, clock)
        fail_after(1.0, target, adapter, library, clock)
        fail_after(0.3, target, adapter, library, clock)
        fail_after(1.0, target, adapter, library, clock)
        fail_after(1.0, target, adapter, library, clock)
        with pytest.raises(CannotContinue, match="wedged"):
            fail_after(1.0, target, adapter, library, clock)


def test_many_writes_that_fail_together_are_one_suspicion(
    library: ScriptedLibrary, adapter: MooncakeAdapter, clock: Callable[[float], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        for number in range(8):
            adapter.submit(write(number, target))
        adapter.poll()
        clock(1.0)
        library.status = dict.fromkeys(library.status, -1)
        assert 8 == len(adapter.poll())


def test_a_dead_peer_is_not_taken_for_the_wedge(
    library: ScriptedLibrary, adapter: MooncakeAdapter, clock: Callable[[float], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
    for _ in range(4):
        fail_after(1.0, target, adapter, library, clock)


def fail_after(
    seconds: float,
    target: str,
    adapter: MooncakeAdapter,
    library: ScriptedLibrary,
    clock: Callable[[float], None],
) -> None:
    adapter.submit(write(1, target))
    adapter.poll()
    clock(seconds)
    library.status[len(library.handed)] = -1
    assert [False] == [completed.ok for completed in adapter.poll()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the adapter's clock forward; it stands still otherwise."""
    now = 1000.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    return advance
