"""An arena that only copies reach: the device path, over a plain tensor where no GPU is."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from pdcluster_engine.memory import device as device_module
from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.memory.device import (
    DeviceArena,
    TensorWindow,
    record_on,
    require_device,
    reserve,
)
from pdcluster_engine.memory.metadata import MetadataRow, MetadataTable, metadata_bytes
from pdcluster_engine.memory.window import HostWindow
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout, Region

CPU = torch.device("cpu")
LAYOUT = KVLayout(
    page_size=64, dtype="float32", regions=(Region(0, "key", 128), Region(0, "value", 96))
)
SLOTS = 3


def tensor_window(nbytes: int, *, staging_bytes: int) -> TensorWindow:
    return TensorWindow(torch.zeros(nbytes, dtype=torch.uint8), staging_bytes=staging_bytes)


@pytest.mark.parametrize("seed", [31])
def test_copies_show_the_same_bytes_as_a_view_whatever_the_buffer_holds(seed: int) -> None:
    chance = random.Random(seed)
    views = HostWindow(memoryview(bytearray(10_000)))
    copies = tensor_window(10_000, staging_bytes=256)
    assert views.nbytes == copies.nbytes
    for _ in range(200):
        offset = chance.randrange(10_000)
        nbytes = min(chance.choice((0, 1, 255, 256, 257, 3000)), 10_000 - offset)
        content = chance.randbytes(nbytes)
        views.write(offset, content)
        copies.write(offset, content)
        place, length = chance.randrange(5000), chance.randrange(5000)
        assert bytes(views.read(place, length)) == copies.read(place, length)
        assert views.digest(place, length) == copies.digest(place, length)
    assert xxhash.xxh3_64_intdigest(views.read(0, 10_000)) == copies.digest(0, 10_000)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 101), (100, 1), (5, -1)])
def test_a_range_outside_the_window_is_refused(offset: int, nbytes: int) -> None:
    for window in (
        HostWindow(memoryview(bytearray(100))),
        tensor_window(100, staging_bytes=16),
    ):
        with pytest.raises(ValueError, match="the window has 100 bytes"):
            window.read(offset, nbytes)
        with pytest.raises(ValueError, match="the window has 100 bytes"):
            window.digest(offset, nbytes)
    with pytest.raises(ValueError, match="the window has 100 bytes"):
        tensor_window(100, staging_bytes=16).write(99, b"ab")


def test_metadata_rows_on_a_device_have_the_bytes_of_those_on_the_host() -> None:
    arena = DeviceArena.create(CPU, LAYOUT, 5, metadata_bytes=metadata_bytes(SLOTS))
    host = Arena.create(LAYOUT, 5, metadata_bytes=metadata_bytes(SLOTS))
    rows = [
        MetadataRow(token=7, logprob=-0.5, top_logprobs=((7, -0.5), (9, -3.25)), room=1 << 60),
        MetadataRow(token=8, room=1),
    ]
    for memory in (arena, host):
        table = MetadataTable(memory.window, memory.metadata_offset, SLOTS)
        for slot, row in enumerate(rows):
            table.write(slot, row)
        assert rows == [table.read(slot) for slot in range(2)]
        assert [1 << 60, 1, 0] == [table.room(slot) for slot in range(SLOTS)]
        table.clear(1)
        assert 0 == table.room(1)
    assert (host.nbytes, host.metadata_offset) == (arena.nbytes, arena.metadata_offset)
    assert bytes(host.view) == arena.window.read(0, arena.nbytes)
    host.close()


def test_what_a_transport_gets_is_the_tensor_itself() -> None:
    arena = DeviceArena.create(CPU, LAYOUT, 2, metadata_bytes=0)
    memory = arena.memory()
    assert (arena.tensor.data_ptr(), arena.nbytes) == (memory.address, memory.nbytes)
    assert not memory.on_device
    arena.tensor[5] = 9
    assert b"\x09" == memory.window.read(5, 1)


def test_an_arena_without_pages_or_beyond_the_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="pages is 0"):
        DeviceArena.create(CPU, LAYOUT, 0, metadata_bytes=0)
    with pytest.raises(ConfigError, match=r"pages is \d+, which needs \d+ bytes on cpu"):
        DeviceArena.create(CPU, LAYOUT, 1 << 44, metadata_bytes=0)


def test_on_the_cpu_the_arena_is_shared_memory_and_nothing_is_queued() -> None:
    arena = reserve(require_device("cpu"), LAYOUT, 1, metadata_bytes=0)
    assert isinstance(arena, Arena)
    arena.close()
    assert record_on(CPU) is None


def test_a_device_that_this_machine_lacks_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"device is cuda, but torch .* was built without CUDA"):
        require_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda:1, but torch finds no CUDA device"):
        require_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"device is cuda:2.*sees 2 CUDA devices, cuda:0 to cuda:1"
    ):
        require_device("cuda:2")
    assert [torch.device("cuda", 0), torch.device("cuda", 1)] == [
        require_device(name) for name in ("cuda", "cuda:1")
    ]


def test_too_little_free_memory_and_memory_that_cannot_be_registered_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, tensor = torch.device("cuda", 0), torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 8 << 30))
    device_module._require_free(gpu, 1 << 30, page_count=4)
    with pytest.raises(ConfigError, match=r"pages is 4, which needs 1\.50 GiB on cuda:0; 1\.00"):
        device_module._require_free(gpu, 3 << 29, page_count=4)
    assert 8 << 30 == device_module.device_memory_bytes(gpu)

    segment = {"address": tensor.data_ptr() - 64, "total_size": 128, "is_expandable": False}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    device_module._require_registrable(tensor)
    segment["is_expandable"] = True
    with pytest.raises(ConfigError, match="expandable segments"):
        device_module._require_registrable(tensor)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(ConfigError, match="cudaMallocAsync"):
        device_module._require_registrable(tensor)
