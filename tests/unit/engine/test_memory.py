"""The arena and the metadata rows behind its pages."""

from __future__ import annotations

import fcntl
import mmap
import struct
from pathlib import Path

import pytest
import torch

from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.memory.metadata import (
    METADATA_SLOT_BYTES,
    MetadataRow,
    MetadataTable,
    metadata_bytes,
)
from pdcluster_engine.memory.window import HostWindow
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import ROOM_MAX
from pdcluster_protocol.layout import KVLayout, Region

LAYOUT = KVLayout(
    page_size=64, dtype="float32", regions=(Region(0, "key", 128), Region(0, "value", 96))
)


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def table(slots: int = 3) -> MetadataTable:
    rows = memoryview(bytearray(b"\xee" * metadata_bytes(slots)))
    return MetadataTable(HostWindow(rows), 0, slots)


def test_the_arena_holds_the_pages_and_behind_them_the_metadata() -> None:
    arena = Arena.create(LAYOUT, 5, metadata_bytes=metadata_bytes(3))
    assert LAYOUT.arena_bytes(5) == arena.metadata_offset
    assert 0 == arena.nbytes % 4096
    assert arena.metadata_offset + metadata_bytes(3) <= arena.nbytes
    assert arena.nbytes == len(arena.view)
    arena.close()


def test_another_mapping_of_the_descriptor_sees_what_is_written() -> None:
    arena = Arena.create(LAYOUT, 2, metadata_bytes=0)
    with mmap.mmap(arena.fd, arena.nbytes) as other:
        arena.view[100:103] = b"abc"
        assert b"abc" == other[100:103]
    arena.close()


def test_the_descriptor_is_not_inherited_and_a_second_close_does_nothing() -> None:
    arena = Arena.create(LAYOUT, 1, metadata_bytes=0)
    assert fcntl.FD_CLOEXEC == fcntl.fcntl(arena.fd, fcntl.F_GETFD)
    slice_in_use = arena.view[:4]
    arena.close()
    arena.close()
    assert b"\0\0\0\0" == bytes(slice_in_use)
    assert -1 == arena.fd


def test_a_tensor_over_a_closed_arena_can_still_be_read() -> None:
    arena = Arena.create(LAYOUT, 1, metadata_bytes=0)
    arena.view[:4] = b"\x00\x00\x80\x3f"
    tensor = torch.frombuffer(arena.view, dtype=torch.float32, count=2)
    arena.close()
    assert [1.0, 0.0] == tensor.tolist()


def test_a_closed_arena_without_users_gives_its_memory_back() -> None:
    arena = Arena.create(LAYOUT, 1, metadata_bytes=0)
    before = _mappings()
    arena.close()
    assert before - 1 == _mappings()


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pdcluster-arena")


def test_an_arena_without_pages_or_beyond_the_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="pages is 0"):
        Arena.create(LAYOUT, 0, metadata_bytes=0)
    with pytest.raises(ConfigError, match=r"pages is \d+, which needs \d+ bytes"):
        Arena.create(LAYOUT, 1 << 48, metadata_bytes=0)


def test_buffers_have_the_order_and_widths_of_sglang() -> None:
    sizes = [64, 64, 64, 64, 512, 512, 64, 128, 64, 64]
    place = table().place
    assert sizes == list(place.rows)
    assert METADATA_SLOT_BYTES == sum(sizes) == place.slot_bytes
    # One slot behind the other, in each its rows side by side.
    assert [0, 64, 128] == [place.row_offset(buffer, 0) for buffer in range(3)]
    assert 2 * METADATA_SLOT_BYTES + 64 == place.row_offset(1, 2)


def test_a_row_comes_back_with_exact_floats_and_its_neighbours_untouched() -> None:
    rows = table()
    one = MetadataRow(
        token=7,
        cached_tokens=3,
        logprob=float32(-0.1),
        top_logprobs=((7, float32(-0.1)), (250, float32(-3.3))),
        room=ROOM_MAX,
    )
    other = MetadataRow(token=(1 << 31) - 1, room=1)
    rows.write(0, one)
    rows.write(1, other)
    assert one == rows.read(0)
    assert other == rows.read(1)


def test_a_row_holds_up_to_128_top_logprobs() -> None:
    rows = table()
    full = MetadataRow(
        token=1, logprob=-1.0, top_logprobs=tuple((i, -float(i)) for i in range(128)), room=9
    )
    rows.write(2, full)
    assert full == rows.read(2)
    assert full.top_logprobs[:5] == rows.read(2, top_logprobs=5).top_logprobs
    with pytest.raises(ValueError, match="129 top logprobs"):
        rows.write(2, MetadataRow(token=1, top_logprobs=((1, -1.0),) * 129, room=9))


def test_a_cleared_slot_says_not_written() -> None:
    rows = table()
    rows.write(1, MetadataRow(token=5, room=77))
    rows.clear(1)
    assert 0 == rows.read(1).room
    assert 5 == rows.read(1).token


@pytest.mark.parametrize("room", [0, -1, ROOM_MAX + 1])
def test_a_room_that_cannot_be_is_not_written(room: int) -> None:
    with pytest.raises(ValueError, match=f"room {room}"):
        table().write(0, MetadataRow(token=1, room=room))


def test_slots_and_views_out_of_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slot 3 is not in \[0, 3\)"):
        table().read(3)
    with pytest.raises(ValueError, match="the window has 10 bytes"):
        MetadataTable(HostWindow(memoryview(bytearray(10))), 0, 1)
    with pytest.raises(ValueError, match="token -1"):
        table().write(0, MetadataRow(token=-1, room=1))


def test_random_bytes_of_a_peer_are_read_without_an_error() -> None:
    assert 0xEEEE_EEEE_EEEE_EEEE == table().read(0).room
