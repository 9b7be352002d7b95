"""Rows of a compressed cache in the packed layout `fp8_ds_mla`.

    latent and rope   0 ········ 512 ········ 528 ······· 656
                      512 × e4m3 | 4 × float32 | 64 × bfloat16
    indexer           0 ········ 128 ········ 132
                      128 × e4m3 | 1 × float32

A float32 scale belongs to 128 elements in a row: the largest of them divided by 448, the largest
number of e4m3. What is stored of an element is its quotient by the scale. The rope key keeps its
range and loses mantissa alone, since positions do not survive more.

Packing looks at one row only. So a row has the same bytes whichever chunk or batch it came with,
as far as the numbers that go in are the same, and whoever computes with packed rows must read all
of them back, also those that this very forward wrote.
"""

from __future__ import annotations

import torch

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.sizing import FP8_DS_MLA, FP8_SCALE_BLOCK, ROPE_BYTES, SCALE_BYTES

LATENT_WIDTH = 512
ROPE_WIDTH = 64
INDEXER_WIDTH = 128
WIDTHS = {"latent": LATENT_WIDTH, "rope": ROPE_WIDTH, "indexer": INDEXER_WIDTH}
"""The only ones that the layout is defined for."""

_E4M3_MAX = 448.0
_SCALE_MIN = torch.finfo(torch.float32).tiny
"""A scale of a block of zeros, by which it can be divided."""


def pack_latent(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Bytes `[…, 656]` of latents `[…, 512]` and rope keys `[…, 64]`."""
    return torch.cat([_scaled(latent), _bytes(rope.to(torch.bfloat16))], dim=-1)


def unpack_latent(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and rope keys of bytes `[…, 656]`."""
    scaled = _scaled_bytes(LATENT_WIDTH)
    rope = rows[..., scaled:].view(torch.bfloat16)
    return _unscaled(rows[..., :scaled], LATENT_WIDTH, dtype), rope.to(dtype)


def pack_indexer(keys: torch.Tensor) -> torch.Tensor:
    """Bytes `[…, 132]` of indexer keys `[…, 128]`."""
    return _scaled(keys)


def unpack_indexer(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Indexer keys of bytes `[…, 132]`."""
    return _unscaled(rows, INDEXER_WIDTH, dtype)


def packed_bytes(kind: str) -> int:
    """The bytes of a row of kind `packed` or `indexer`."""
    if kind == "indexer":
        return _scaled_bytes(INDEXER_WIDTH)
    return _scaled_bytes(LATENT_WIDTH) + ROPE_WIDTH * ROPE_BYTES


def require_packable(kind: str, *, heads: int, width: int) -> None:
    """Refuse a region that the layout is not defined for.

    Raises:
        ConfigError: naming the kind and its width.
    """
    if kind not in WIDTHS:
        raise ConfigError(
            f"kv.dtype is {FP8_DS_MLA}; this model stores a {kind} per head and no compressed"
            " latent: use auto"
        )
    if (heads, width) != (1, WIDTHS[kind]):
        raise ConfigError(
            f"kv.dtype is {FP8_DS_MLA}, whose {kind} rows have {WIDTHS[kind]} elements; this"
            f" model's have {heads * width}: use auto"
        )


def _scaled(values: torch.Tensor) -> torch.Tensor:
    """One byte an element, then the scales."""
    blocks = values.float().unflatten(-1, (-1, FP8_SCALE_BLOCK))
    scales = (blocks.abs().amax(dim=-1, keepdim=True) / _E4M3_MAX).clamp_min(_SCALE_MIN)
    codes = (blocks / scales).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.cat([_bytes(codes.flatten(-2)), _bytes(scales.squeeze(-1))], dim=-1)


def _unscaled(rows: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    codes = rows[..., :width].view(torch.float8_e4m3fn).float()
    scales = rows[..., width:].view(torch.float32)
    blocks = codes.unflatten(-1, (-1, FP8_SCALE_BLOCK)) * scales.unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)


def _scaled_bytes(width: int) -> int:
    return width + width // FP8_SCALE_BLOCK * SCALE_BYTES


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
