"""A tiny model over its own arenas, and the library's `generate` beside it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.model.builtin import BUILTIN
from pdcluster_engine.model.loading import LoadedModel, load_runner
from pdcluster_engine.model.port import DecodeRow, RankArena, Written
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.rank_layout import rank_slice
from pdcluster_protocol.topology import Parallelism, RankCoordinate

MODELS = ("tiny-deepseek", "tiny-glm", "tiny-llama", "tiny-qwen")
PAGE_COUNT = 96


class PagedModel:
    """A loaded model with an arena for each of its ranks; pages are handed out scattered."""

    def __init__(
        self,
        name: str = "",
        *,
        mode: str = "exact",
        seed: int = 0,
        loaded: LoadedModel | None = None,
        parallel: Parallelism | None = None,
    ) -> None:
        self.loaded = loaded or load_runner(f"builtin://{name}", dtype="auto", mode=mode, threads=1)
        self.runner = self.loaded.runner
        self.layout = self.loaded.layout
        self.placements = place(self.layout, parallel or Parallelism())
        self.runner.attach(self.placements, PAGE_COUNT)
        self._random = random.Random(seed)
        self._free = list(range(PAGE_COUNT))
        self._random.shuffle(self._free)

    def take(self, tokens: int) -> list[int]:
        count = self.layout.pages_for(tokens)
        taken, self._free = self._free[:count], self._free[count:]
        assert count == len(taken)
        return taken

    def prefill(
        self,
        pages: Sequence[int],
        ids: Sequence[int],
        *,
        chunk: int,
        written: Written = lambda *_: None,
    ) -> torch.Tensor:
        logits = None
        for start in range(0, len(ids), chunk):
            end = min(start + chunk, len(ids))
            logits = self.runner.prefill(pages, ids, start, end, written)
        assert logits is not None
        return logits

    def decode(
        self, pages: Sequence[int], length: int, first: torch.Tensor, *, tokens: int
    ) -> list[torch.Tensor]:
        """Greedy: the logits of `tokens` tokens, `first` being those of the first."""
        logits = [first]
        for step in range(tokens - 1):
            row = DecodeRow(pages, length + step, int(logits[-1].argmax()))
            logits.append(self.runner.decode([row])[0])
        return logits

    def page_bytes(self, region: int, page: int, *, rank: int = 0) -> memoryview:
        """A page of a region by its index in the rank's own slice."""
        begin = self.page_offset(region, page, rank=rank)
        nbytes = self.placements[rank].slice.layout.item_bytes(region)
        return self.arena_bytes(rank)[begin : begin + nbytes]

    def page_offset(self, region: int, page: int, *, rank: int) -> int:
        return self.placements[rank].slice.layout.page_offset(region, page, PAGE_COUNT)

    def arena_bytes(self, rank: int) -> memoryview:
        arena = self.placements[rank].arena
        assert isinstance(arena, Arena)
        return arena.view


def coordinates(parallel: Parallelism) -> list[RankCoordinate]:
    """The ranks of one DP rank, pipeline stage by stage."""
    return [
        RankCoordinate(cp=cp, tp=tp, pp=pp)
        for pp in range(parallel.pp)
        for cp in range(parallel.cp)
        for tp in range(parallel.attention_tp)
    ]


def place(layout: KVLayout, parallel: Parallelism) -> list[RankArena]:
    """An arena for each of `coordinates`."""
    placements = []
    for rank in coordinates(parallel):
        held = rank_slice(layout, parallel, rank)
        arena = Arena.create(held.layout, PAGE_COUNT, metadata_bytes=0)
        # An earlier request's rows: whoever reads one that it did not write sees it at once.
        arena.view[:] = b"\xff" * arena.nbytes
        placements.append(RankArena(held, arena))
    return placements


def move_rows(
    source: PagedModel,
    from_pages: Sequence[int],
    target: PagedModel,
    to_pages: Sequence[int],
    *,
    tokens: int,
) -> None:
    """Copy the bytes of valid rows as a transfer does; both sides have the same ranks."""
    size = source.layout.page_size
    for rank, placement in enumerate(source.placements):
        for region, described in enumerate(placement.slice.layout.regions):
            for index, (one, other) in enumerate(zip(from_pages, to_pages, strict=False)):
                nbytes = min(size, tokens - index * size) * described.bytes_per_token
                rows = source.page_bytes(region, one, rank=rank)[:nbytes]
                target.page_bytes(region, other, rank=rank)[:nbytes] = rows


def generate(
    model: str | PreTrainedModel, ids: Sequence[int], *, chunk: int | None, tokens: int
) -> list[torch.Tensor]:
    """The library's own logits, token by token, of a builtin model by name or of any model."""
    if isinstance(model, str):
        model = _builtin(model)
    # The oracle runs on, so that its length does not depend on a random model's whim.
    model.generation_config.eos_token_id = None
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=tokens,
        prefill_chunk_size=chunk,
        pad_token_id=257,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output = model.generate(
        torch.tensor([list(ids)]),
        generation_config=config,
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
    )
    return [step[0] for step in output.logits]


@functools.cache
def _builtin(name: str) -> PreTrainedModel:
    return BUILTIN[name]().eval()
