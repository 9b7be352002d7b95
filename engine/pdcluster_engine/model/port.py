"""The port between the engine loop and the model.

One thread calls a runner. A forward writes KV rows into pages that the caller owns and reads only
rows that the caller says are there: pages are arbitrary numbers, and whatever an earlier request
left behind the last valid row is never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from pdcluster_engine.memory.arena import Arena
from pdcluster_engine.memory.device import DeviceArena
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.rank_layout import RankSlice

Written = Callable[[int, int, int], None]
"""(region of the whole layout, first token, end token): these rows are final and in the arenas.

Called inside the forward, while later layers still compute: put it into a queue and return. On an
asynchronous device the rows are final behind the device's current stream (`memory.finality`).
"""


class DecodeRow(msgspec.Struct, frozen=True):
    """One sequence of a decode step."""

    pages: Sequence[int]
    length: int
    """Tokens whose KV rows are already in `pages`; this step writes row `length`."""
    token_id: int
    """The newest token, which has no row yet."""


class RankArena(msgspec.Struct, frozen=True):
    """One rank's memory, and what of the whole model's rows lies in it."""

    slice: RankSlice
    arena: Arena | DeviceArena


class ModelRunner(Protocol):
    """A loaded model over the pages of its ranks' arenas."""

    layout: KVLayout
    """Of the whole model, whatever its ranks hold."""
    vocab_size: int
    eos_ids: frozenset[int]
    max_context: int
    """The model's own limit of prompt plus output tokens."""

    def attach(self, placements: Sequence[RankArena], page_count: int) -> None:
        """View the arenas' regions as tensors; once, before the first forward.

        Each arena has `page_count` pages; page numbers mean the same page in all of them.
        """

    def prefill(
        self,
        pages: Sequence[int],
        token_ids: Sequence[int],
        start: int,
        end: int,
        written: Written,
    ) -> torch.Tensor | None:
        """One chunk of one request: tokens [start, end) of `token_ids`.

        The rows of [0, start) are already in `pages`. Returns float32 logits `[vocab]` of token
        end - 1, which only the last chunk's caller needs; they lie where the model does.
        """

    def decode(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        """One token for each row, one KV row written each.

        Returns float32 logits `[rows, vocab]` in host memory.
        """
