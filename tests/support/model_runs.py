"""A tiny model over its own arena, and the library's `generate` beside it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.model.builtin import BUILTIN
from pdcluster_engine.model.loading import LoadedModel, load_runner
from pdcluster_engine.model.port import DecodeRow, Written

MODELS = ("tiny-glm", "tiny-llama")
PAGE_COUNT = 96


class PagedModel:
    """A loaded model with an arena of its own, whose pages are handed out scattered."""

    def __init__(
        self,
        name: str = "",
        *,
        mode: str = "exact",
        seed: int = 0,
        loaded: LoadedModel | None = None,
    ) -> None:
        self.loaded = loaded or load_runner(f"builtin://{name}", dtype="auto", mode=mode, threads=1)
        self.runner = self.loaded.runner
        self.layout = self.loaded.layout
        self.arena = Arena.create(self.layout, PAGE_COUNT, metadata_bytes=0)
        # An earlier request's rows: whoever reads one that it did not write sees it at once.
        self.arena.view[:] = b"\xff" * self.arena.nbytes
        self.runner.attach(self.arena, PAGE_COUNT)
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

    def page_bytes(self, region: int, page: int) -> memoryview:
        begin = self.layout.page_offset(region, page, PAGE_COUNT)
        return self.arena.view[begin : begin + self.layout.item_bytes(region)]


def prompt(length: int, *, seed: int = 0) -> list[int]:
    draw = random.Random(f"{seed}/{length}")
    return [draw.randrange(256) for _ in range(length)]


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
