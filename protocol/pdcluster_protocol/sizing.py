"""How much KV cache a model needs, by arithmetic on its `config.json`: no weights, no model code.

An engine finds its layout by running one token through the model; sizing has only the config, so it
knows each family's rule and refuses a family that it does not know rather than guess. Three shapes
exist (elements per token and layer):

- heads: keys and values of every KV head, 2 x heads x head width;
- compressed (`deepseek_v2`, `deepseek_v3`): one latent row and one rope key for all heads. The
  config's `head_dim` means something else here and is never read;
- indexed (`glm_moe_dsa`, `deepseek_v32`): compressed, and on *full* layers one row of indexer keys;
  *shared* layers reuse the selection of the full layer before them and store none.

`fp8_ds_mla` packs a compressed row to one byte an element with a float32 scale per 128 of the
latent, and the rope key in bfloat16 (512 + 16 + 128 = 656 bytes at full size); an indexer row to
one byte an element and one scale per 128 (132 bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import msgspec

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout, Region

FP8_DS_MLA = "fp8_ds_mla"
FP8_SCALE_BLOCK = 128
SCALE_BYTES = 4
ROPE_BYTES = 2
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
}
NATIVE_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", FP8_DS_MLA)
"""What `kv.dtype` may be with the native engine."""
DEFAULT_POOL_CONTEXTS = 4
DEFAULT_POOL_MEMORY_FRACTION = 8


class CacheShape(Enum):
    """What a family's layers store."""

    HEADS = "heads"
    COMPRESSED = "compressed"
    INDEXED = "indexed"


FAMILIES: dict[str, CacheShape] = {
    "llama": CacheShape.HEADS,
    "mistral": CacheShape.HEADS,
    "qwen2": CacheShape.HEADS,
    "qwen3": CacheShape.HEADS,
    "qwen3_moe": CacheShape.HEADS,
    "glm": CacheShape.HEADS,
    "glm4": CacheShape.HEADS,
    "glm4_moe": CacheShape.HEADS,
    "deepseek_v2": CacheShape.COMPRESSED,
    "deepseek_v3": CacheShape.COMPRESSED,
    "glm4_moe_lite": CacheShape.COMPRESSED,
    "deepseek_v32": CacheShape.INDEXED,
    "glm_moe_dsa": CacheShape.INDEXED,
}

PER_TOKEN_LAYERS = frozenset({"full_attention", "indexed_attention"})

FP8_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""The only row widths that the packed layout is defined for, by the config's fields."""

BUILTIN_CONFIGS: dict[str, Mapping[str, object]] = {
    "tiny-deepseek": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "max_position_embeddings": 32768,
        "dtype": "float32",
    },
    "tiny-glm": {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 3,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "index_head_dim": 32,
        "indexer_types": ["full", "full", "shared"],
        "max_position_embeddings": 32768,
        "dtype": "float32",
    },
    "tiny-glm-wide": {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "indexer_types": ["full", "full", "shared"],
        "max_position_embeddings": 32768,
        "dtype": "float32",
    },
    "tiny-llama": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "dtype": "float32",
    },
    "tiny-qwen": {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "dtype": "float32",
    },
}
"""What sizing needs of the engine's builtin models; a test compares them with the engine's own."""


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one DP rank: what a token, a page and the longest prompt occupy."""

    model_type: str
    layout: KVLayout
    max_context: int

    @property
    def bytes_per_token(self) -> int:
        """Over all layers."""
        return self.layout.bytes_per_token

    @property
    def bytes_per_page(self) -> int:
        """Over all layers."""
        return self.bytes_per_token * self.layout.page_size

    @property
    def pages_at_max_context(self) -> int:
        """Pages of one prompt as long as allowed."""
        return self.layout.pages_for(self.max_context)

    @property
    def bytes_at_max_context(self) -> int:
        """What moves for one prompt as long as allowed."""
        return self.bytes_per_token * self.max_context

    def default_pool_pages(self, memory_bytes: int) -> int:
        """Four times the longest prompt, but at most an eighth of the memory."""
        affordable = memory_bytes // DEFAULT_POOL_MEMORY_FRACTION // self.bytes_per_page
        return min(DEFAULT_POOL_CONTEXTS * self.pages_at_max_context, affordable)

    def fits(self, pool_pages: int) -> bool:
        """Whether a pool holds the longest prompt; below that an engine will not start."""
        return pool_pages >= self.pages_at_max_context


def size(config: Mapping[str, object], *, dtype: str, page_size: int, max_context: int) -> Sizing:
    """The sizing of a model by its config.

    Raises:
        ConfigError: an unknown family, layers that keep no row per token, a missing or wrong field,
            a cache type that the family does not have, a context beyond the model's.
    """
    family, shape = _family(config)
    _require_per_token_layers(config, family)
    limit = config.get("max_position_embeddings")
    if isinstance(limit, int) and max_context > limit:
        raise ConfigError(
            f"maxContext is {max_context}; the model's max_position_embeddings is {limit}: lower"
            " spec.model.maxContext"
        )
    name = _dtype(config, dtype)
    if shape is CacheShape.HEADS:
        regions = tuple(_head_regions(config, name))
    else:
        regions = tuple(_compressed_regions(config, name, indexed=shape is CacheShape.INDEXED))
    layout = KVLayout(page_size=page_size, dtype=name, regions=regions)
    return Sizing(model_type=family, layout=layout, max_context=max_context)


def indexer_types(config: Mapping[str, object]) -> tuple[str, ...]:
    """`full` or `shared` for each layer: stated, or derived from a pattern or a frequency.

    Raises:
        ConfigError: a list or pattern of another length, or one that does not begin with full.
    """
    layers = _integer(config, "num_hidden_layers")
    stated = config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    if isinstance(stated, list | tuple):
        types = tuple(str(kind) for kind in stated)
    elif pattern is not None:
        types = tuple("full" if kind in {"F", "full"} else "shared" for kind in _items(pattern))
    else:
        frequency = _integer(config, "index_topk_freq", default=1)
        offset = _integer(config, "index_skip_topk_offset", default=2)
        types = tuple(
            "full" if max(layer - offset + 1, 0) % frequency == 0 else "shared"
            for layer in range(layers)
        )
    if len(types) < layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise ConfigError(
            f"indexer_types has {len(types)} entries for {layers} layers; it needs one of full or"
            " shared for each, the first full"
        )
    # Entries beyond the layers belong to the prediction layers that are not served.
    return types[:layers]


def _family(config: Mapping[str, object]) -> tuple[str, CacheShape]:
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ConfigError(f"config.json: model_type is {family!r}; it must name the model's family")
    if family not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {family!r} is not known to sizing; known are"
            f" {', '.join(sorted(FAMILIES))}"
        )
    return family, FAMILIES[family]


def _require_per_token_layers(config: Mapping[str, object], family: str) -> None:
    types = config.get("layer_types")
    named = {str(kind) for kind in types} if isinstance(types, list | tuple) else set[str]()
    if config.get("use_sliding_window"):
        named.add("sliding_attention")
    if family == "mistral" and config.get("sliding_window") is not None:
        named.add("sliding_attention")
    others = sorted(named - PER_TOKEN_LAYERS)
    if others:
        raise ConfigError(
            f"config.json: {family} has layers of type {', '.join(others)}; only layers that keep"
            " one row per token can be moved page by page"
        )


def _dtype(config: Mapping[str, object], dtype: str) -> str:
    """The cache's type; `auto` is the checkpoint's own."""
    if dtype == "auto":
        stated = config.get("dtype", config.get("torch_dtype"))
        dtype = stated if isinstance(stated, str) else "float32"
    if dtype != FP8_DS_MLA and dtype not in DTYPE_BYTES:
        known = ", ".join(sorted([*DTYPE_BYTES, FP8_DS_MLA]))
        raise ConfigError(f"kv.dtype is {dtype!r}; it must be auto or one of {known}")
    return dtype


def _head_regions(config: Mapping[str, object], dtype: str) -> Iterator[Region]:
    if dtype == FP8_DS_MLA:
        raise ConfigError(
            f"kv.dtype is {FP8_DS_MLA}; {config.get('model_type')} stores keys and values per head:"
            " use auto"
        )
    attention_heads = _integer(config, "num_attention_heads")
    heads = _integer(config, "num_key_value_heads", default=attention_heads)
    width = _integer(config, "head_dim", default=0)
    width = width or _integer(config, "hidden_size") // attention_heads
    nbytes = heads * width * DTYPE_BYTES[dtype]
    for layer in range(_integer(config, "num_hidden_layers")):
        yield Region(layer=layer, kind="key", bytes_per_token=nbytes, heads=heads)
        yield Region(layer=layer, kind="value", bytes_per_token=nbytes, heads=heads)


def _compressed_regions(
    config: Mapping[str, object], dtype: str, *, indexed: bool
) -> Iterator[Region]:
    latent, rope = _integer(config, "kv_lora_rank"), _integer(config, "qk_rope_head_dim")
    layers = _integer(config, "num_hidden_layers")
    types = indexer_types(config) if indexed else ("shared",) * layers
    width = _integer(config, "index_head_dim") if indexed else 0
    if dtype == FP8_DS_MLA:
        _require_fp8_widths(config, indexed=indexed)
    for layer, kind in enumerate(types):
        if dtype == FP8_DS_MLA:
            packed = _scaled(latent) + rope * ROPE_BYTES
            yield Region(layer=layer, kind="packed", bytes_per_token=packed)
            indexer = _scaled(width)
        else:
            element = DTYPE_BYTES[dtype]
            yield Region(layer=layer, kind="latent", bytes_per_token=latent * element)
            yield Region(layer=layer, kind="rope", bytes_per_token=rope * element)
            indexer = width * element
        if kind == "full":
            yield Region(layer=layer, kind="indexer", bytes_per_token=indexer)


def _require_fp8_widths(config: Mapping[str, object], *, indexed: bool) -> None:
    for field, width in FP8_WIDTHS.items():
        if field == "index_head_dim" and not indexed:
            continue
        if config[field] != width:
            raise ConfigError(
                f"kv.dtype is {FP8_DS_MLA}, which is defined for {field} {width}; the model's is"
                f" {config[field]}: use auto"
            )


def _scaled(elements: int) -> int:
    """Bytes of a row of one byte an element with its scales."""
    return elements + -(-elements // FP8_SCALE_BLOCK) * SCALE_BYTES


def _items(pattern: object) -> list[object]:
    if isinstance(pattern, str | list | tuple):
        return list(pattern)
    raise ConfigError(f"config.json: index_topk_pattern is {pattern!r}; it must be a text or list")


def _integer(config: Mapping[str, object], field: str, *, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        if default is not None:
            return default
        raise ConfigError(f"config.json: {field} is missing; this model's cache depends on it")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {field} is {value!r}; it must be a positive whole number")
    return value
