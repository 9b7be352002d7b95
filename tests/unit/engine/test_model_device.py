"""The model over an arena of the device path gives the logits that it gives over shared memory."""

from __future__ import annotations

import pytest
import torch

from pdcluster_engine.memory.device import DeviceArena
from pdcluster_engine.model.loading import load_runner
from pdcluster_engine.model.port import DecodeRow, RankArena
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.rank_layout import rank_slice
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.model_runs import MODELS, PAGE_COUNT, PagedModel
from support.prompts import prompt


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_page_bytes_are_identical(name: str) -> None:
    host = PagedModel(name)
    other = load_runner(f"builtin://{name}", dtype="auto", mode="exact", threads=1)
    arena = DeviceArena.create(torch.device("cpu"), other.layout, PAGE_COUNT, metadata_bytes=0)
    whole = rank_slice(other.layout, Parallelism(), RankCoordinate())
    other.runner.attach([RankArena(whole, arena)], PAGE_COUNT)
    ids = prompt(130)
    pages = host.take(150)
    expected = host.prefill(pages, ids, chunk=50)
    logits = None
    for start in range(0, 130, 50):
        end = min(start + 50, 130)
        logits = other.runner.prefill(pages, ids, start, end, lambda *_: None)
    assert torch.equal(expected, logits)
    row = DecodeRow(pages, 130, int(expected.argmax()))
    assert torch.equal(host.runner.decode([row]), other.runner.decode([row]))
    for region in range(len(host.layout.regions)):
        begin = host.layout.page_offset(region, pages[0], PAGE_COUNT)
        nbytes = host.layout.item_bytes(region)
        assert bytes(host.page_bytes(region, pages[0])) == arena.window.read(begin, nbytes)


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda"):
        load_runner("builtin://tiny-llama", dtype="auto", mode="exact", threads=1, device="cuda")
