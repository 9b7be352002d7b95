"""The small parts of the transfer layer: framing, timer, mapping, log, installation, bounds."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest

from pdcluster_engine.transport.addresses import AddressPlan
from pdcluster_engine.transport.causes import StderrTail, explain_exit
from pdcluster_engine.transport.channel import Channel, ChannelClosed
from pdcluster_engine.transport.install import (
    check_address,
    check_rdma,
    explain_import,
    mooncake_version,
)
from pdcluster_engine.transport.linux import Timer, die_with_parent, map_shared, view
from pdcluster_engine.transport.open import open_transport
from pdcluster_engine.transport.port import (
    Completed,
    Deadlines,
    DigestRequest,
    Request,
    WriteRequest,
)
from pdcluster_protocol.errors import ConfigError
from support.arenas import memfd

WRITE = WriteRequest(1, "127.64.1.2:15000", 0, 1 << 46, 64, True)
DIGEST = DigestRequest(2, 0, (1 << 63) - 1)


def channels() -> tuple[Channel[Request], Channel[Completed]]:
    left, right = socket.socketpair()
    return Channel(left, Request), Channel(right, Completed)


def test_messages_arrive_in_order_over_any_cut_of_the_stream() -> None:
    requests, answers = channels()
    left, right = socket.socketpair()
    collector: Channel[Completed] = Channel(left, Completed)
    collector.send([WRITE, DIGEST])
    collector.send([DIGEST])
    stream = right.recv(4096)
    got: list[Request] = []
    for position in range(len(stream)):
        answers_socket = socket.socket(fileno=os.dup(answers.fileno()))
        answers_socket.send(stream[position : position + 1])
        answers_socket.close()
        got += requests.receive()
    assert [WRITE, DIGEST, DIGEST] == got
    for end in (requests, answers, collector, right):
        end.close()


def test_what_the_socket_does_not_take_is_kept_and_sent_later() -> None:
    requests, answers = channels()
    completed = Completed(1, True, (1 << 64) - 1, "x" * 500)
    for _ in range(2000):
        requests.send([completed])
    assert requests.unsent_bytes > 0
    got: list[Completed] = []
    while len(got) < 2000:
        got += answers.receive()
        requests.flush()
    assert [completed] * 2000 == got
    assert 0 == requests.unsent_bytes
    requests.close()
    answers.close()


def test_the_end_of_the_stream_comes_after_all_messages() -> None:
    requests, answers = channels()
    answers.send([WRITE])
    answers.close()
    assert [WRITE] == requests.receive()
    with pytest.raises(ChannelClosed, match="end of stream"):
        requests.receive()
    requests.send([WRITE])
    assert 0 == requests.unsent_bytes
    requests.close()


@pytest.mark.parametrize("raw", [b"\x01\0\0\0\xc1", b"\x02\0\0\0\x91\x05", b"\xff\xff\xff\xff"])
def test_unreadable_bytes_close_the_channel(raw: bytes) -> None:
    left, right = socket.socketpair()
    channel: Channel[Request] = Channel(left, Request)
    right.sendall(raw)
    with pytest.raises(ChannelClosed):
        channel.receive()
    channel.close()
    right.close()


def test_a_timer_fires_once_and_can_be_moved_and_disarmed() -> None:
    timer = Timer()
    assert [] == select.select([timer], [], [], 0)[0]
    timer.arm(0.0)
    assert [timer] == select.select([timer], [], [], 5)[0]
    timer.clear()
    assert [] == select.select([timer], [], [], 0)[0]
    timer.arm(time.monotonic() + 0.02)
    timer.arm(None)
    assert [] == select.select([timer], [], [], 0.05)[0]
    timer.arm(time.monotonic() + 0.02)
    assert [timer] == select.select([timer], [], [], 5)[0]
    timer.close()
    timer.close()


def test_a_mapping_lies_where_it_was_asked_and_never_over_another() -> None:
    with memfd(1 << 20) as fd:
        address = AddressPlan(1 << 20).take()
        assert address == map_shared(fd, 1 << 20, address=address)
        view(address, 1 << 20)[7] = 9
        assert b"\x09" == os.pread(fd, 1, 7)
        with pytest.raises(OSError, match="mmap"):
            map_shared(fd, 1 << 20, address=address)


def test_addresses_of_generations_do_not_overlap() -> None:
    nbytes = 5 << 30
    plan = AddressPlan(nbytes)
    taken = sorted(plan.take() for _ in range(1000))
    assert all(b - a > nbytes for a, b in itertools.pairwise(taken))
    assert taken[0] >= 0x1000_0000_0000
    assert taken[-1] + nbytes <= 0x5000_0000_0000


def test_a_process_whose_parent_is_gone_is_told() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(1 << 22)
        except ProcessLookupError:
            os.write(writing, b"gone")
        os._exit(0)
    os.waitpid(child, 0)
    assert b"gone" == os.read(reading, 10)
    os.close(reading)
    os.close(writing)


def test_the_newest_known_log_line_is_the_cause_and_expected_noise_is_dropped() -> None:
    reading, writing = os.pipe()
    tail = StderrTail(reading)
    os.write(writing, b"E1201 13:34:29.6 7 x.cpp:1] Local segment descriptor not found\n")
    assert tail.drain()
    assert ("", "") == (tail.cause(), tail.last_line())
    os.write(writing, b"E1201 13:34:29.6 7 x.cpp:1] connect(): Connection refused [111]\nhalf")
    assert tail.drain()
    assert "connection refused: no transfer process listens there" == tail.cause()
    assert "connect(): Connection refused [111]" == tail.last_line()
    os.write(writing, b" a line\n" + b"y" * 50_000 + b"\n")
    assert tail.drain()
    assert 400 >= len(tail.last_line())
    os.close(writing)
    assert not tail.drain()
    os.close(reading)


def test_ends_of_processes_are_named() -> None:
    assert "killed by SIGSEGV" == explain_exit(-signal.SIGSEGV)
    assert "did not come back" in explain_exit(-signal.SIGALRM)
    assert "exited with 1" == explain_exit(1)
    assert "killed by signal 99" == explain_exit(-99)


def test_exactly_one_new_enough_wheel_must_be_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'pdcluster\[mooncake-cpu\]'"):
        mooncake_version([str(tmp_path)])
    old = tmp_path / "mooncake_transfer_engine_non_cuda-0.3.12.dist-info"
    old.mkdir()
    with pytest.raises(ConfigError, match="too old"):
        mooncake_version([str(tmp_path)])
    old.rename(tmp_path / "mooncake_transfer_engine_non_cuda-0.3.13.post1.dist-info")
    assert "0.3.13.post1" == mooncake_version([str(tmp_path), str(tmp_path)])
    (tmp_path / "mooncake_transfer_engine_cuda13-0.3.14.dist-info").mkdir()
    with pytest.raises(
        ConfigError,
        match="pip uninstall -y mooncake-transfer-engine-cuda13 mooncake-transfer-engine-non-cuda",
    ):
        mooncake_version([str(tmp_path)])


def test_a_missing_library_is_named_with_its_package() -> None:
    error = ImportError("libibverbs.so.1: cannot open shared object file")
    assert "Mooncake needs libibverbs.so.1; install libibverbs1" == explain_import(error)
    assert "reinstall" in explain_import(ImportError("something else"))


def test_rdma_needs_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rdma"):
        check_rdma(tmp_path / "absent")
    with pytest.raises(ConfigError, match="rdma"):
        check_rdma(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    check_rdma(tmp_path)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "pod-0.svc", "127.0.0.1:15000"])
def test_addresses_that_peers_cannot_reach_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="transport host"):
        check_address(host, port_min=15000, port_max=15031)


@pytest.mark.parametrize(("low", "high"), [(15000, 15006), (80, 90), (65530, 65540), (9, 8)])
def test_too_few_or_impossible_ports_are_refused(low: int, high: int) -> None:
    with pytest.raises(ConfigError, match="transport ports"):
        check_address("10.0.0.1", port_min=low, port_max=high)


def test_rdma_without_an_adapter_is_refused_when_the_transport_is_opened() -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("this machine may have an adapter")
    with memfd(4096) as fd, pytest.raises(ConfigError, match="no adapter"):
        open_transport(
            "mooncake",
            arena_fd=fd,
            arena_nbytes=4096,
            host="127.64.1.1",
            port_min=15000,
            port_max=15031,
            protocol="rdma",
        )


def test_the_stall_deadline_grows_with_the_bytes() -> None:
    clocks = Deadlines(base_seconds=2.0, bytes_per_second_min=1000.0)
    assert 2.0 == clocks.stall_seconds(0)
    assert 5.0 == clocks.stall_seconds(3000)
