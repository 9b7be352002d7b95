"""The KV cache of GLM-5.3 as moves of bytes: what a prompt's runs look like in two arenas."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.sizing import size

CONFIG = Path(__file__).resolve().parents[1] / "examples/models/glm-5.3/config.json"
PAGE_TOKENS = 64
DTYPE = "fp8_ds_mla"


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One operation, as offsets in the arenas of both sides."""

    source: int
    destination: int
    nbytes: int
    """Of one piece."""
    pieces: int = 1
    source_stride: int = 0
    destination_stride: int = 0


def glm_layout() -> KVLayout:
    """78 regions of 656 bytes a token and 21 of 132."""
    config = msgspec.json.decode(CONFIG.read_bytes(), type=dict[str, object])
    return size(config, dtype=DTYPE, page_size=PAGE_TOKENS, max_context=PAGE_TOKENS).layout


def runs(layout: KVLayout, *, pages: int, run_bytes_max: int) -> list[Move]:
    """Every page of a full arena, lowest page first, in runs as long as they may be.

    Both pools gave one extent, but not the same one: the destination's begins in the middle.
    """
    moves: list[tuple[int, Move]] = []
    for region in range(len(layout.regions)):
        item = layout.item_bytes(region)
        length = max(1, run_bytes_max // item)
        for half, other in ((0, pages // 2), (pages // 2, 0)):
            for first in range(half, half + pages // 2, length):
                count = min(length, half + pages // 2 - first)
                source = layout.page_offset(region, first, pages)
                destination = layout.page_offset(region, first - half + other, pages)
                moves.append((first, Move(source, destination, count * item)))
    moves.sort(key=lambda placed: placed[0])
    return [move for _, move in moves]


def head_slices(*, operations: int, pieces: int, nbytes: int, ratio: int) -> list[Move]:
    """One of `ratio` equal parts of each row, token by token: one operation for `pieces` rows."""
    row = nbytes * ratio
    return [
        Move(
            source=number * pieces * row,
            destination=number * pieces * nbytes,
            nbytes=nbytes,
            pieces=pieces,
            source_stride=row,
            destination_stride=nbytes,
        )
        for number in range(operations)
    ]
