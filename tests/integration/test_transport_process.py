"""The life of a transfer process: deadlines, fences, restarts, its engine's death, idleness."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import (
    Completed,
    Deadlines,
    Died,
    DigestRequest,
    Fenced,
    Ready,
)
from pdcluster_engine.transport.supervised import SupervisedTransport
from pdcluster_protocol.errors import TransportError
from support.arenas import Side, engine_process, memfd, mooncake_side, open_descriptors
from support.ports import fresh_host, transfer_ports

SENDER, RECEIVER = fresh_host(), fresh_host()
MIB = 1 << 20


@pytest.fixture
def sender() -> Iterator[Side]:
    with mooncake_side(SENDER) as side:
        yield side


@pytest.fixture
def receiver() -> Iterator[Side]:
    with mooncake_side(RECEIVER) as side:
        yield side


def test_an_expired_deadline_ends_the_process_instead_of_reporting_a_failure(
    receiver: Side,
) -> None:
    clocks = Deadlines(base_seconds=0.5, bytes_per_second_min=1 << 30)
    with mooncake_side(SENDER, deadlines=clocks) as sender:
        sender.wait(Ready)
        peer = receiver.wait(Ready)
        sender.write(peer, source=0, destination=0, nbytes=64)
        assert sender.wait(Completed).ok
        os.kill(receiver.pid, signal.SIGSTOP)
        operation = sender.write(peer, source=0, destination=0, nbytes=16 * MIB)
        died = sender.wait(Died)
        assert "stalled" in died.detail
        assert peer.session_name in died.detail
        assert 2 == sender.wait(Ready).generation
        assert [] == [
            e for e in sender.seen if isinstance(e, Completed) and e.operation == operation
        ]


def test_a_first_contact_with_a_hung_peer_is_cut_by_the_alarm(receiver: Side) -> None:
    with mooncake_side(SENDER, deadlines=Deadlines(contact_seconds=0.5)) as sender:
        sender.wait(Ready)
        peer = receiver.wait(Ready)
        os.kill(receiver.pid, signal.SIGSTOP)
        sender.write(peer, source=0, destination=0, nbytes=64)
        died = sender.wait(Died)
        assert "did not come back" in died.detail
        assert peer.session_name in died.detail


def test_a_stopped_transfer_process_is_ended_by_the_engine(receiver: Side) -> None:
    clocks = Deadlines(base_seconds=0.1, bytes_per_second_min=1 << 30)
    with mooncake_side(SENDER, deadlines=clocks) as sender:
        sender.wait(Ready)
        peer = receiver.wait(Ready)
        os.kill(sender.pid, signal.SIGSTOP)
        sender.write(peer, source=0, destination=0, nbytes=64)
        assert "gave no answer" in sender.wait(Died).detail
        assert 2 == sender.wait(Ready).generation


def test_twenty_fences_leave_no_descriptor_behind(sender: Side) -> None:
    sender.wait(Ready)
    before = open_descriptors()
    bases = set()
    for generation in range(1, 21):
        sender.transport.fence()
        sender.transport.fence()
        assert generation == sender.wait(Fenced).generation
        ready = sender.wait(Ready)
        assert generation + 1 == ready.generation
        bases.add(ready.base_address)
    assert 20 == len(bases)
    assert before == open_descriptors()


def test_a_closed_transport_leaves_neither_process_nor_descriptor() -> None:
    before = open_descriptors()
    with mooncake_side(SENDER) as side:
        side.wait(Ready)
        watch = os.pidfd_open(side.pid)
        side.transport.close()
        side.transport.close()
        assert [watch] == select.select([watch], [], [], 0)[0]
        os.close(watch)
        assert [] == side.transport.events()
    assert before == open_descriptors()


def test_an_idle_transfer_process_is_small_and_uses_no_cpu(sender: Side, receiver: Side) -> None:
    sender.wait(Ready)
    peer = receiver.wait(Ready)
    sender.write(peer, source=0, destination=0, nbytes=MIB)
    assert sender.wait(Completed).ok
    before = _cpu_seconds(sender.pid) + _cpu_seconds(receiver.pid)
    sender.pump(1.0)
    assert 0.04 >= _cpu_seconds(sender.pid) + _cpu_seconds(receiver.pid) - before
    assert "torch" not in Path(f"/proc/{sender.pid}/maps").read_text()
    assert 90 * 1024 > _resident_kib(sender.pid)


def test_the_transfer_process_dies_with_its_engine() -> None:
    with engine_process([SENDER]) as (engine, (child,)):
        watch = os.pidfd_open(child)
        # Stopped, it cannot notice anything by itself: the kernel has to end it.
        os.kill(child, signal.SIGSTOP)
        engine.kill()
        assert [watch] == select.select([watch], [], [], 10)[0]
        os.close(watch)


def test_a_full_port_range_is_named_and_tried_again_until_one_is_free() -> None:
    low = int(transfer_ports()["transport_port_min"])
    holders = [_listen(low + offset) for offset in range(8)]
    settings = Settings(host=SENDER, port_min=low, port_max=low + 7)
    with memfd(MIB) as fd:
        side = Side(SupervisedTransport(settings, arena_fd=fd, arena_nbytes=MIB), fd, MIB)
        try:
            side.transport.start()
            died = side.wait(Died)
            assert not died.final
            assert f"ports {low} to {low + 7}" in died.detail
            for holder in holders:
                holder.close()
            assert 1 < side.wait(Ready).generation
        finally:
            side.transport.close()
            for holder in holders:
                holder.close()


def test_rdma_without_an_adapter_ends_for_good() -> None:
    settings = Settings(host=SENDER, port_min=16976, port_max=16983, protocol="rdma")
    with memfd(MIB) as fd:
        side = Side(SupervisedTransport(settings, arena_fd=fd, arena_nbytes=MIB), fd, MIB)
        try:
            side.transport.start()
            died = side.wait(Died)
            assert died.final
            assert "rdma" in died.detail
            with pytest.raises(TransportError, match="rdma"):
                side.transport.submit(DigestRequest(1, 0, 1))
        finally:
            side.transport.close()


def _listen(port: int) -> socket.socket:
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])
