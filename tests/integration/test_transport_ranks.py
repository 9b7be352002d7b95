"""Several transports in one engine process, as its ranks have them: apart in all they own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pdcluster_engine.transport.mooncake import Settings
from pdcluster_engine.transport.port import Completed, Died, Fenced, Ready
from pdcluster_engine.transport.supervised import SupervisedTransport
from support.arenas import Side, engine_process, memfd, mooncake_side, open_descriptors
from support.ports import RANGE, fresh_host, transfer_ports

ENGINE, PEER = fresh_host(), fresh_host()
RANKS = 4
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def ranks() -> Iterator[list[Side]]:
    """The transports of one engine: one address, a range of ports and an arena each."""
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(mooncake_side(ENGINE, nbytes=MIB)) for _ in range(RANKS)]
        yield sides


def test_ranks_write_to_each_other_and_to_a_peer_at_once(ranks: list[Side]) -> None:
    contents = [side.fill(seed) for seed, side in enumerate(ranks)]
    ready = [side.wait(Ready) for side in ranks]
    assert RANKS == len({side.pid for side in ranks})
    assert RANKS == len({one.session_name for one in ready})
    bases = sorted(one.base_address for one in ready)
    assert all(b - a >= MIB for a, b in pairwise(bases))
    with mooncake_side(PEER, nbytes=RANKS * MIB) as peer:
        there = peer.wait(Ready)
        for number, side in enumerate(ranks):
            for part in range(16):
                place = part * 64 * KIB
                side.write(there, source=place, destination=number * MIB + place, nbytes=64 * KIB)
        for side in ranks:
            assert {True} == {one.ok for one in side.wait_completed(16).values()}
        assert b"".join(contents) == peer.read()
    for number, side in enumerate(ranks):
        neighbour = ready[(number + 1) % RANKS]
        side.write(neighbour, source=0, destination=512 * KIB, nbytes=256 * KIB)
    for number, side in enumerate(ranks):
        assert side.wait(Completed).ok
        neighbour_side = ranks[(number + 1) % RANKS]
        assert contents[number][: 256 * KIB] == neighbour_side.read(512 * KIB, 256 * KIB)


def test_the_end_of_one_ranks_transport_is_not_seen_by_the_others(ranks: list[Side]) -> None:
    first, second, *others = ranks
    ready = [side.wait(Ready) for side in ranks]
    pids = [side.pid for side in others]
    os.kill(first.pid, signal.SIGKILL)
    second.transport.fence()
    assert "SIGKILL" in first.wait(Died).detail
    assert 1 == second.wait(Fenced).generation
    new = [first.wait(Ready), second.wait(Ready)]
    assert [2, 2] == [one.generation for one in new]
    for side in others:
        side.write(ready[2], source=0, destination=0, nbytes=64 * KIB)
        assert side.wait(Completed).ok
        side.write(new[0], source=0, destination=0, nbytes=64 * KIB)
        assert side.wait(Completed).ok
    assert pids == [side.pid for side in others]
    assert [] == [one for side in others for one in side.seen if isinstance(one, Died | Fenced)]


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)])
def test_ranks_close_in_any_order_and_leave_nothing(order: tuple[int, ...]) -> None:
    before = open_descriptors()
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(mooncake_side(ENGINE, nbytes=MIB)) for _ in range(RANKS)]
        ready = [side.wait(Ready) for side in sides]
        watches = [os.pidfd_open(side.pid) for side in sides]
        for done, number in enumerate(order):
            sides[number].transport.close()
            assert [watches[number]] == select.select([watches[number]], [], [], 0)[0]
            left = order[done + 1 :]
            for other in left:
                sides[other].write(ready[left[0]], source=0, destination=0, nbytes=4 * KIB)
                assert sides[other].wait(Completed).ok
        for watch in watches:
            os.close(watch)
    assert before == open_descriptors()


def test_no_transfer_process_holds_a_descriptor_of_another_one(ranks: list[Side]) -> None:
    for side in ranks:
        side.wait(Ready)
    inodes = [Path(f"/proc/self/fd/{side.arena_fd}").stat().st_ino for side in ranks]
    for number, side in enumerate(ranks):
        process = Path(f"/proc/{side.pid}")
        held = {
            each.stat().st_ino
            for each in (process / "fd").iterdir()
            if "memfd:" in str(each.readlink())
        }
        maps = (process / "maps").read_text().splitlines()
        held |= {int(line.split()[4]) for line in maps if "memfd:" in line}
        assert {inodes[number]} == held


def test_all_transfer_processes_die_with_their_engine() -> None:
    with engine_process([ENGINE] * RANKS) as (engine, pids):
        watches = [os.pidfd_open(pid) for pid in pids]
        assert RANKS == len(watches)
        engine.kill()
        for watch in watches:
            assert [watch] == select.select([watch], [], [], 10)[0]
            os.close(watch)


def test_ranks_that_share_a_range_of_ports_take_different_ones() -> None:
    low = int(transfer_ports()["transport_port_min"])
    settings = Settings(host=ENGINE, port_min=low, port_max=low + RANGE - 1)
    with contextlib.ExitStack() as stack:
        sides = []
        for _ in range(RANKS):
            fd = stack.enter_context(memfd(MIB))
            transport = SupervisedTransport(settings, arena_fd=fd, arena_nbytes=MIB)
            stack.callback(transport.close)
            transport.start()
            sides.append(Side(transport, fd, MIB))
        ports = {int(side.wait(Ready).session_name.rpartition(":")[2]) for side in sides}
        assert RANKS == len(ports)
        assert ports <= set(range(low, low + RANGE))
