"""Prefill chunks and decode steps of a library model over pages."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never

import torch
from transformers import PreTrainedModel

from pdcluster_engine.model.cache import PagedCache
from pdcluster_engine.model.port import DecodeRow, RankArena, Written
from pdcluster_engine.model.probe import Probed
from pdcluster_engine.model.shards import region_rows
from pdcluster_engine.model.shim import forward_batch, forward_one


class DecodeMode(StrEnum):
    """How a decode step computes many sequences."""

    EXACT = "exact"
    """One forward each: logits are bit-identical to a run alone."""
    BATCHED = "batched"
    """One forward for all: last bits depend on the batch; float32 tokens stay equal."""


class TransformersRunner:
    """A `ModelRunner` whose forward is the library's."""

    def __init__(
        self,
        model: PreTrainedModel,
        probed: Probed,
        *,
        mode: DecodeMode,
        eos_ids: frozenset[int],
        max_context: int,
    ) -> None:
        self.layout = probed.layout
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self.eos_ids = eos_ids
        self.max_context = max_context
        self.mode = mode
        self._model = model
        self._probed = probed
        self._cache: PagedCache | None = None

    def attach(self, placements: Sequence[RankArena], page_count: int) -> None:
        """View the arenas' regions as tensors; see the port.

        Raises:
            ValueError: the placements together do not hold the whole model.
        """
        regions = region_rows(
            self.layout,
            placements,
            page_count,
            widths=self._probed.widths,
            dtype=self._probed.dtype,
        )
        self._cache = PagedCache(self._probed.layers, regions, self.layout.page_size)

    def prefill(
        self,
        pages: Sequence[int],
        token_ids: Sequence[int],
        start: int,
        end: int,
        written: Written,
    ) -> torch.Tensor:
        """One chunk of one request; see the port.

        Raises:
            ValueError: an empty chunk, or one that pages or tokens do not cover.
        """
        if not 0 <= start < end <= len(token_ids):
            message = f"chunk [{start}, {end}) of {len(token_ids)} tokens"
            raise ValueError(message)
        cache = self._attached()
        cache.use(cache.plan_one(pages, start, end, written))
        with torch.inference_mode():
            return forward_one(self._model, cache, self._ids([token_ids[start:end]]))

    def decode(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        """One token for each row; see the port.

        A batch of one is computed as a single sequence in both modes: that is faster and is what
        `generate` computes.
        """
        if not rows:
            message = "a decode step needs at least one row"
            raise ValueError(message)
        mode = DecodeMode.EXACT if len(rows) == 1 else self.mode
        with torch.inference_mode():
            match mode:
                case DecodeMode.EXACT:
                    # On a device: one copy for all of them, not one each.
                    return torch.stack([self._decode_one(row) for row in rows]).cpu()
                case DecodeMode.BATCHED:
                    return self._decode_batch(rows).cpu()
                case _:
                    assert_never(mode)

    def _decode_one(self, row: DecodeRow) -> torch.Tensor:
        cache = self._attached()
        cache.use(cache.plan_one(row.pages, row.length, row.length + 1))
        return forward_one(self._model, cache, self._ids([[row.token_id]]))

    def _decode_batch(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        cache = self._attached()
        batch = cache.plan_batch(rows)
        cache.use(batch.plan)
        token_ids = self._ids([[row.token_id] for row in rows])
        return forward_batch(
            self._model, cache, token_ids, positions=batch.positions, mask=batch.mask
        )

    def _ids(self, token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([list(ids) for ids in token_ids], device=self._model.device)

    def _attached(self) -> PagedCache:
        if self._cache is None:
            message = "attach an arena before the first forward"
            raise RuntimeError(message)
        return self._cache
