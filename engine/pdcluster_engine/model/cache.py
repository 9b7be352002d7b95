"""The library's cache interface over the pages of the ranks' arenas.

Each region has rows `[pages × page_size, heads, width]` (`shards`); row `page[t // page_size] ×
page_size + t % page_size` holds token t. A `Plan` says once per forward which rows are new
(`scatter`) and which rows attention sees (`gather`); all layers share it. Attention hands each
layer its new keys and values, the layer puts them into the arenas and returns all rows so far, in
order, as if they had been concatenated.

Columns behind the end of a shorter sequence in a batch repeat its newest row: masked columns are
still multiplied (by zero), and a NaN there would spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from pdcluster_engine.model.packing import (
    pack_indexer,
    pack_latent,
    unpack_indexer,
    unpack_latent,
)
from pdcluster_engine.model.port import DecodeRow, Written
from pdcluster_engine.model.shards import RegionRows


class LayerRegions(msgspec.Struct, frozen=True):
    """Which regions of the layout belong to one model layer."""

    keys: int
    values: int
    indexer: int | None = None


class PackedRegions(msgspec.Struct, frozen=True):
    """Which regions belong to one model layer whose rows are packed (`packing`)."""

    packed: int
    indexer: int | None = None


class Plan(msgspec.Struct, frozen=True):
    """What one forward writes and reads, as rows of the regions."""

    scatter: torch.Tensor
    """`[B × S]` rows of the new tokens."""
    gather: torch.Tensor
    """`[B × T]` rows that attention sees, sequence by sequence."""
    batch: int
    length: int
    """Cached tokens before this forward; of the longest sequence in a batch."""
    written: Callable[[int], None] | None = None
    """Called with a region's index when its new rows are in the arena."""


class Batch(msgspec.Struct, frozen=True):
    """A plan for one token of each of many sequences, with what the forward needs beside it."""

    plan: Plan
    positions: torch.Tensor
    """`[B, 1]`."""
    mask: torch.Tensor
    """`[B, 1, 1, T]` bool."""


class PagedLayer(CacheLayerMixin):
    """One model layer's rows; state is the arenas', so this holds none of its own."""

    is_sliding = False

    def __init__(self, cache: PagedCache, *, indexer: int | None) -> None:
        super().__init__()
        self.is_initialized = True
        self._cache = cache
        self._indexer = indexer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the arenas exist before the first forward."""

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store `[B, S, width]` and return all rows `[B, T, width]`."""
        if self._indexer is None:
            message = "this layer showed no indexer keys when it was probed"
            raise RuntimeError(message)
        return self._cache.store(self._indexer, indexer_key_states.unsqueeze(2)).squeeze(2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return -1


class PlainLayer(PagedLayer):
    """Rows as the model makes them, in two regions."""

    def __init__(self, cache: PagedCache, regions: LayerRegions) -> None:
        super().__init__(cache, indexer=regions.indexer)
        self._regions = regions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[B, heads, S, width]` and return all rows `[B, heads, T, width]`."""
        keys = self._cache.store(self._regions.keys, key_states.transpose(1, 2))
        values = self._cache.store(self._regions.values, value_states.transpose(1, 2))
        return keys.transpose(1, 2), values.transpose(1, 2)


class PackedLayer(PagedLayer):
    """Packs what it stores and computes with what it reads back, also of the newest rows."""

    def __init__(self, cache: PagedCache, regions: PackedRegions) -> None:
        super().__init__(cache, indexer=regions.indexer)
        self._packed = regions.packed

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store latents `[B, 1, S, 512]` and rope keys `[B, 1, S, 64]` and return all rows."""
        rows = pack_latent(key_states, value_states)
        stored = self._cache.store(self._packed, rows.transpose(1, 2))
        return unpack_latent(stored.transpose(1, 2), key_states.dtype)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """See `PagedLayer.update_indexer`."""
        stored = super().update_indexer(pack_indexer(indexer_key_states))
        return unpack_indexer(stored, indexer_key_states.dtype)


class PagedCache(Cache):
    """All layers over the regions; `plan` is set before each forward."""

    def __init__(
        self,
        layers: Sequence[LayerRegions | PackedRegions],
        regions: Sequence[RegionRows],
        page_size: int,
    ) -> None:
        super().__init__(layers=[self._layer(layer) for layer in layers])
        self._regions = list(regions)
        self._page_size = page_size
        self._device = self._regions[0].device
        self._in_page = torch.arange(page_size, device=self._device)
        self._plan: Plan | None = None

    @property
    def length(self) -> int:
        """Cached tokens before the running forward."""
        return self._running_plan().length

    def use(self, plan: Plan) -> None:
        """Make `plan` the one of the next forward."""
        self._plan = plan

    def _layer(self, regions: LayerRegions | PackedRegions) -> PagedLayer:
        match regions:
            case LayerRegions():
                return PlainLayer(self, regions)
            case PackedRegions():
                return PackedLayer(self, regions)
            case _:
                assert_never(regions)

    def store(self, region: int, states: torch.Tensor) -> torch.Tensor:
        """Put rows `[B, S, heads, width]` into a region; return all rows `[B, T, heads, width]`."""
        plan = self._running_plan()
        rows = self._regions[region]
        row_shape = states.shape[2:]
        rows.store(plan.scatter, states.reshape(-1, *row_shape))
        if plan.written is not None:
            plan.written(region)
        return rows.gather(plan.gather).view(plan.batch, -1, *row_shape)

    def plan_one(
        self, pages: Sequence[int], start: int, end: int, written: Written | None = None
    ) -> Plan:
        """A plan for tokens [start, end) of one sequence."""
        self._require_pages(pages, end)
        rows = self._rows(pages[: self._pages_for(end)])
        report = None if written is None else _reporting(written, start, end)
        return Plan(
            scatter=rows[start:end], gather=rows[:end], batch=1, length=start, written=report
        )

    def plan_batch(self, batch: Sequence[DecodeRow]) -> Batch:
        """A plan for one new token of each sequence, all from column 0."""
        page_lists = []
        for row in batch:
            self._require_pages(row.pages, row.length + 1)
            page_lists.append(row.pages[: self._pages_for(row.length + 1)])
        most = max(len(pages) for pages in page_lists)
        table = self._tensor([[*pages, *([0] * (most - len(pages)))] for pages in page_lists])
        lengths = self._tensor([[row.length] for row in batch])
        columns = torch.arange(max(row.length for row in batch) + 1, device=self._device)
        rows = (table.unsqueeze(2) * self._page_size + self._in_page).flatten(1)
        newest = rows.gather(1, lengths)
        visible = columns <= lengths
        gather = torch.where(visible, rows[:, : len(columns)], newest)
        plan = Plan(
            scatter=newest.flatten(),
            gather=gather.flatten(),
            batch=len(batch),
            length=len(columns) - 1,
        )
        return Batch(plan=plan, positions=lengths, mask=visible[:, None, None, :])

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """The row of each token that `pages` can hold."""
        table = self._tensor(pages)
        return (table.unsqueeze(1) * self._page_size + self._in_page).flatten()

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _require_pages(self, pages: Sequence[int], tokens: int) -> None:
        if len(pages) * self._page_size < tokens:
            message = f"{len(pages)} pages of {self._page_size} cannot hold {tokens} tokens"
            raise ValueError(message)

    def _running_plan(self) -> Plan:
        if self._plan is None:
            message = "a forward without a plan"
            raise RuntimeError(message)
        return self._plan


def _reporting(written: Written, start: int, end: int) -> Callable[[int], None]:
    def report(region: int) -> None:
        written(region, start, end)

    return report
