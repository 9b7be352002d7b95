"""Operations of many equal pieces: one end, one digest, and bounds that see the last piece."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
import xxhash

from pdcluster_engine.memory.device import TensorWindow
from pdcluster_engine.memory.pieces import Pieces
from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.transport.faulty import FaultyTransport
from pdcluster_engine.transport.local import LocalTransport
from pdcluster_engine.transport.port import (
    PIECES_MAX,
    Completed,
    Deadlines,
    DigestRequest,
    Ready,
    WriteRequest,
)
from pdcluster_engine.transport.requests import PIECE_BYTES_MIN, Outstanding
from pdcluster_protocol.errors import TransportError
from pdcluster_protocol.fault_plan import Fault, FaultPlan
from support.arenas import Side, memfd

NBYTES = 1 << 20
PIECES, PIECE, FAR, NEAR = 1000, 256, 1024, 300
"""A row of 1,024 bytes gives 256; at the peer rows have 300."""


@contextmanager
def local_side(shares: dict[Fault, float] | None = None) -> Iterator[Side]:
    with memfd(NBYTES) as fd:
        inner = LocalTransport(arena_fd=fd, arena_nbytes=NBYTES, deadlines=Deadlines())
        plan = FaultPlan(seed=5, shares=shares or {})
        transport = FaultyTransport(inner, plan, arena_fd=fd, arena_nbytes=NBYTES)
        try:
            transport.start()
            yield Side(transport, fd, NBYTES)
        finally:
            transport.close()


@pytest.fixture
def receiver() -> Iterator[Side]:
    with local_side() as side:
        yield side


def strided(peer: Ready, *, source: int = 7, destination: int = 11) -> WriteRequest:
    return WriteRequest(
        operation=1,
        target=peer.session_name,
        source_offset=source,
        destination_address=peer.base_address + destination,
        nbytes=PIECE,
        digest=True,
        pieces=PIECES,
        source_stride=FAR,
        destination_stride=NEAR,
    )


def gathered(content: bytes, *, offset: int, stride: int) -> bytes:
    return b"".join(content[offset + i * stride :][:PIECE] for i in range(PIECES))


def landed(content: bytes) -> bytes:
    """An arena of zeros after the write of `strided`."""
    arena = bytearray(NBYTES)
    for i in range(PIECES):
        place = 11 + i * NEAR
        arena[place : place + PIECE] = content[7 + i * FAR :][:PIECE]
    return bytes(arena)


def test_all_pieces_land_and_one_digest_is_that_of_their_bytes_in_order(receiver: Side) -> None:
    with local_side() as sender:
        content = sender.fill(1)
        digest = xxhash.xxh3_64_intdigest(gathered(content, offset=7, stride=FAR))
        sender.transport.submit(strided(receiver.wait(Ready)))
        assert Completed(1, True, digest, "") == sender.wait(Completed, receiver)
        assert landed(content) == receiver.read()
        receiver.transport.submit(DigestRequest(2, 11, PIECE, PIECES, NEAR))
        assert Completed(2, True, digest, "") == receiver.wait(Completed)


def test_a_flipped_byte_lies_in_one_of_the_pieces(receiver: Side) -> None:
    with local_side({Fault.FLIPPED_BYTE: 1.0}) as sender:
        content = sender.fill(2)
        sender.transport.submit(strided(receiver.wait(Ready)))
        assert sender.wait(Completed, receiver).ok
        wrong = [
            place
            for place, (a, b) in enumerate(zip(landed(content), receiver.read(), strict=True))
            if a != b
        ]
        assert 1 == len(wrong)
        assert PIECE > (wrong[0] - 11) % NEAR


def test_an_early_completion_has_the_digest_of_the_pieces(receiver: Side) -> None:
    with local_side({Fault.EARLY_COMPLETION: 1.0}) as sender:
        content = sender.fill(3)
        sender.transport.submit(strided(receiver.wait(Ready)))
        digest = xxhash.xxh3_64_intdigest(gathered(content, offset=7, stride=FAR))
        assert digest == sender.wait(Completed).digest


def test_a_last_piece_outside_the_peers_arena_fails_the_write_and_lands_nothing(
    receiver: Side,
) -> None:
    with local_side() as sender:
        sender.fill(4)
        peer = receiver.wait(Ready)
        last = NBYTES - (PIECES - 1) * NEAR - PIECE
        sender.transport.submit(strided(peer, destination=last + 1))
        assert not sender.wait(Completed, receiver).ok
        assert bytes(NBYTES) == receiver.read()
        sender.transport.submit(strided(peer, destination=last))
        assert sender.wait(Completed, receiver).ok


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"source_offset": NBYTES - 999 * FAR - PIECE + 1}, "the arena has"),
        ({"source_stride": 255}, "they overlap"),
        ({"source_stride": -FAR}, "they overlap"),
        ({"pieces": 0}, "at least 1"),
        ({"pieces": PIECES_MAX + 1}, f"at most {PIECES_MAX}"),
    ],
)
def test_pieces_that_leave_the_own_arena_or_are_none_are_refused(
    receiver: Side, changed: dict[str, int], refusal: str
) -> None:
    peer = receiver.wait(Ready)
    with pytest.raises(TransportError, match=refusal):
        receiver.transport.submit(msgspec.structs.replace(strided(peer), **changed))
    names = {"source_offset": "offset", "source_stride": "stride"}
    request = DigestRequest(1, 7, PIECE, PIECES, FAR)
    renamed = {names.get(name, name): value for name, value in changed.items()}
    with pytest.raises(TransportError, match=refusal):
        receiver.transport.submit(msgspec.structs.replace(request, **renamed))


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"destination_stride": 255}, "overlap at the peer"),
        ({"destination_stride": 1 << 60}, "impossible"),
        ({"destination_address": (1 << 64) - 999 * NEAR - 255}, "impossible"),
    ],
)
def test_what_a_peer_said_about_its_pieces_fails_the_write_and_raises_nothing(
    receiver: Side, changed: dict[str, int], cause: str
) -> None:
    write = msgspec.structs.replace(strided(receiver.wait(Ready)), **changed)
    receiver.transport.submit(write)
    completed = receiver.wait(Completed)
    assert (1, False) == (completed.operation, completed.ok)
    assert cause in completed.detail


def test_small_pieces_count_for_more_than_their_bytes_where_time_is_estimated() -> None:
    outstanding = Outstanding(NBYTES, operations_max=9)
    outstanding.add(DigestRequest(1, 0, PIECE, PIECES, FAR))
    assert PIECES * PIECE_BYTES_MIN == outstanding.nbytes
    outstanding.add(DigestRequest(2, 0, NBYTES))
    assert PIECES * PIECE_BYTES_MIN + NBYTES == outstanding.nbytes
    assert outstanding.remove(1)
    assert outstanding.remove(2)
    assert 0 == outstanding.nbytes


@pytest.mark.parametrize("seed", [41])
def test_views_and_both_windows_agree_on_the_bytes_of_any_pieces(seed: int) -> None:
    chance = random.Random(seed)
    content = chance.randbytes(20_000)
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    windows = (HostWindow(memoryview(content)), TensorWindow(tensor, staging_bytes=512))
    for _ in range(200):
        nbytes, count = chance.choice((1, 7, 256, 600)), chance.choice((1, 2, 3, 20))
        stride = nbytes + chance.choice((0, 1, 300))
        pieces = Pieces(chance.randrange(500), nbytes, count, stride)
        expected = b"".join(content[pieces.offset + i * stride :][:nbytes] for i in range(count))
        assert len(expected) == pieces.total_nbytes
        got = bytearray()
        while len(got) < len(expected):
            views = pieces.views(memoryview(content), len(got), nbytes_max=400, count_max=3)
            assert 3 >= len(views)
            got += b"".join(views)
        assert expected == bytes(got)
        for window in windows:
            digest = window.digest(pieces.offset, nbytes, pieces=count, stride=stride)
            assert xxhash.xxh3_64_intdigest(expected) == digest


@pytest.mark.parametrize(("pieces", "stride"), [(0, 8), (2, -8), (2, 93)])
def test_a_window_refuses_pieces_outside_of_it(pieces: int, stride: int) -> None:
    for window in (
        HostWindow(memoryview(bytearray(100))),
        TensorWindow(torch.zeros(100, dtype=torch.uint8), staging_bytes=16),
    ):
        with pytest.raises(ValueError, match=r"window has 100|at least 1"):
            window.digest(0, 8, pieces=pieces, stride=stride)
