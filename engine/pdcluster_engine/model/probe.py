"""One token through the library's own cache tells what each layer stores.

Arithmetic on a config would have to know every family's exceptions (`head_dim` alone means three
things); shapes of a real forward cannot lie. A cache whose layers are not plain per-token tensors
(sliding windows, recurrent states) is refused by the name of its layer class, since there is no
row to send for a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer

from pdcluster_engine.model.cache import LayerRegions, PackedRegions
from pdcluster_engine.model.packing import packed_bytes, require_packable
from pdcluster_engine.model.shim import forward_one
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.sizing import FP8_DS_MLA


class Probed(msgspec.Struct, frozen=True):
    """The layout of a model's cache, and how the engine's tensors map to it."""

    layout: KVLayout
    layers: tuple[LayerRegions | PackedRegions, ...]
    widths: tuple[int, ...]
    """Elements that a row of each region has for each of its heads."""
    dtype: torch.dtype
    """Of an element; bytes where rows are packed."""


def probe(model: PreTrainedModel, *, page_size: int) -> Probed:
    """Run one token and read every layer.

    Raises:
        ConfigError: naming the layer class, or the layer, that cannot be paged.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    _require_per_token_layers(cache.layers)
    with torch.inference_mode():
        forward_one(model, cache, torch.zeros((1, 1), dtype=torch.long, device=model.device))
    _require_per_token_layers(cache.layers)
    compressed = getattr(config, "kv_lora_rank", None) is not None
    regions: list[Region] = []
    widths: list[int] = []
    layers: list[LayerRegions] = []
    dtypes: set[torch.dtype] = set()
    for index, layer in enumerate(cache.layers):
        first = len(regions)
        for kind, rows in _rows_of(index, layer, compressed=compressed):
            heads, width = int(rows.shape[1]), int(rows.shape[3])
            nbytes = heads * width * int(rows.element_size())
            regions.append(Region(layer=index, kind=kind, bytes_per_token=nbytes, heads=heads))
            widths.append(width)
            dtypes.add(rows.dtype)
        indexer = first + 2 if len(regions) - first == 3 else None
        layers.append(LayerRegions(keys=first, values=first + 1, indexer=indexer))
    if len(dtypes) != 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "none"
        raise ConfigError(f"the cache has rows of several types ({names}); one is supported")
    dtype = dtypes.pop()
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout(page_size=page_size, dtype=name, regions=tuple(regions))
    return Probed(layout=layout, layers=tuple(layers), widths=tuple(widths), dtype=dtype)


def packed(plain: Probed) -> Probed:
    """The same cache with the rows of `fp8_ds_mla`: one region for latent and rope key.

    Raises:
        ConfigError: naming the kind of rows that cannot be packed.
    """
    for region, width in zip(plain.layout.regions, plain.widths, strict=True):
        require_packable(region.kind, heads=region.heads, width=width)
    kinds = {"latent": "packed", "indexer": "indexer"}
    regions = tuple(
        Region(region.layer, kinds[region.kind], packed_bytes(kinds[region.kind]))
        for region in plain.layout.regions
        if region.kind in kinds
    )
    places = {(region.layer, region.kind): index for index, region in enumerate(regions)}
    layers = tuple(
        PackedRegions(places[layer, "packed"], places.get((layer, "indexer")))
        for layer in range(len(plain.layers))
    )
    return Probed(
        layout=msgspec.structs.replace(plain.layout, dtype=FP8_DS_MLA, regions=regions),
        layers=layers,
        widths=tuple(region.bytes_per_token for region in regions),
        dtype=torch.uint8,
    )


def _rows_of(
    index: int, layer: CacheLayerMixin, *, compressed: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """(kind, tensor `[1, heads, 1, width]`) of each region of a layer."""
    if layer.keys is None or layer.values is None:
        raise ConfigError(
            f"cache layer {index} stored nothing for one token; models that share KV between "
            "layers are not supported"
        )
    yield ("latent" if compressed else "key"), layer.keys
    yield ("rope" if compressed else "value"), layer.values
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise ConfigError(f"cache layer {index} stores indexer positions, which are not supported")
    if getattr(layer, "indexer_keys", None) is not None:
        yield "indexer", layer.indexer_keys.unsqueeze(1)


def _require_per_token_layers(layers: list[CacheLayerMixin]) -> None:
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicIndexedLayer):
            raise ConfigError(
                f"cache layer {index} is a {type(layer).__name__}: only models whose layers keep "
                "one row per token (DynamicLayer, DynamicIndexedLayer) can be served; sliding "
                "windows, recurrent states and hybrids cannot"
            )
