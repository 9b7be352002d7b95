"""Arithmetic on configs: the figures everybody can check, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.sizing import BUILTIN_CONFIGS, FAMILIES, Sizing, indexer_types, size

ROOT = Path(__file__).parents[3]
GLM_5_3 = msgspec.json.decode(
    (ROOT / "examples/models/glm-5.3/config.json").read_bytes(), type=dict[str, object]
)


def sized(config: dict[str, object], dtype: str = "auto", max_context: int = 4096) -> Sizing:
    return size(config, dtype=dtype, page_size=64, max_context=max_context)


def test_glm_5_3_has_21_full_layers_of_78() -> None:
    types = indexer_types(GLM_5_3)

    full = [layer for layer, kind in enumerate(types) if kind == "full"]
    assert [0, 1, 2, *range(6, 78, 4)] == full
    assert (78, 21) == (len(types), len(full))


def test_glm_5_3_packed_needs_53_940_bytes_a_token_and_56_6_gb_for_a_million() -> None:
    sizing = sized(GLM_5_3, dtype="fp8_ds_mla", max_context=1 << 20)

    assert 656 * 78 + 132 * 21 == sizing.bytes_per_token == 53_940
    assert 16_384 == sizing.pages_at_max_context
    assert "56.6" == f"{sizing.bytes_at_max_context / 1e9:.1f}"


def test_glm_5_3_unpacked_needs_95_232_bytes_a_token() -> None:
    assert 95_232 == sized(GLM_5_3).bytes_per_token


@pytest.mark.parametrize(
    ("expected", "config"),
    [
        (
            32 * 4096,
            {
                "model_type": "llama",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "torch_dtype": "bfloat16",
            },
        ),
        (
            1024,
            {
                "model_type": "glm4",
                "num_hidden_layers": 1,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "dtype": "bfloat16",
            },
        ),
        (
            61 * 1152,
            {
                "model_type": "deepseek_v3",
                "num_hidden_layers": 61,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "head_dim": 64,
                "dtype": "bfloat16",
            },
        ),
        (
            2 * (1152 + 256),
            {
                "model_type": "deepseek_v32",
                "num_hidden_layers": 2,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "index_head_dim": 128,
                "dtype": "bfloat16",
            },
        ),
    ],
    ids=["llama", "glm4", "deepseek_v3", "deepseek_v32"],
)
def test_families_have_their_known_bytes_per_token(
    expected: int, config: dict[str, object]
) -> None:
    assert expected == sized(config).bytes_per_token


def test_head_dim_absent_is_hidden_size_over_heads() -> None:
    assert 2 * 2 * 2 * 16 * 4 == sized(dict(BUILTIN_CONFIGS["tiny-llama"])).bytes_per_token


def test_a_pattern_names_the_full_layers() -> None:
    config = {**GLM_5_3, "num_hidden_layers": 4, "index_topk_pattern": "FSSF"}

    assert ("full", "shared", "shared", "full") == indexer_types(config)


def test_entries_for_layers_that_are_not_served_are_left_out() -> None:
    config = {**GLM_5_3, "num_hidden_layers": 2, "indexer_types": ["full", "shared", "full"]}

    assert ("full", "shared") == indexer_types(config)


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("model_type 'mamba' is not known to sizing; known are", {"model_type": "mamba"}),
        ("model_type 'glm5_next' is not known", {"model_type": "glm5_next"}),
        ("model_type is None", {"model_type": None}),
        ("layers of type linear_attention", {"layer_types": ["linear_attention"]}),
        ("layers of type sliding_attention", {"use_sliding_window": True}),
        ("kv_lora_rank is missing", {"kv_lora_rank": None}),
        ("kv_lora_rank is '512'; it must be a positive", {"kv_lora_rank": "512"}),
        ("kv_lora_rank is 0", {"kv_lora_rank": 0}),
        ("indexer_types has 1 entries for 78 layers", {"indexer_types": ["full"]}),
        ("the first full", {"indexer_types": ["shared"] * 78}),
        ("index_topk_pattern is 3", {"index_topk_pattern": 3}),
        (
            "maxContext is 4096; the model's max_position_embeddings is 100",
            {"max_position_embeddings": 100},
        ),
    ],
)
def test_what_cannot_be_sized_is_refused_by_name(expected: str, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        sized({**GLM_5_3, **changes})

    assert expected in caught.value.detail


def test_a_cache_type_that_the_family_lacks_is_refused() -> None:
    llama = dict(BUILTIN_CONFIGS["tiny-llama"])
    with pytest.raises(ConfigError, match="stores keys and values per head"):
        sized(llama, dtype="fp8_ds_mla")
    with pytest.raises(ConfigError, match=r"kv\.dtype is 'int3'; it must be auto or one of"):
        sized(llama, dtype="int3")


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("defined for kv_lora_rank 512; the model's is 256: use auto", {"kv_lora_rank": 256}),
        ("defined for qk_rope_head_dim 64; the model's is 32", {"qk_rope_head_dim": 32}),
        ("defined for index_head_dim 128; the model's is 64", {"index_head_dim": 64}),
    ],
)
def test_packed_rows_of_other_widths_are_refused_by_the_field(
    expected: str, changes: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        sized({**GLM_5_3, **changes}, dtype="fp8_ds_mla")
    assert expected in caught.value.detail

    assert sized({**GLM_5_3, **changes}).bytes_per_token > 0


def test_a_model_without_indexer_packs_latents_alone() -> None:
    deepseek = {**GLM_5_3, "model_type": "deepseek_v3", "num_hidden_layers": 61}
    assert 61 * 656 == sized(deepseek, dtype="fp8_ds_mla").bytes_per_token


def test_the_default_pool_is_four_contexts_but_an_eighth_of_the_memory_at_most() -> None:
    sizing = sized(dict(BUILTIN_CONFIGS["tiny-glm"]))

    assert 4 * 64 == sizing.default_pool_pages(1 << 40)
    assert 10 == sizing.default_pool_pages(8 * 10 * sizing.bytes_per_page + 7)
    assert (True, False) == (sizing.fits(64), sizing.fits(63))


def test_every_family_is_sized_by_one_of_three_shapes() -> None:
    config: dict[str, object] = {
        **GLM_5_3,
        "num_attention_heads": 8,
        "hidden_size": 64,
        "indexer_types": ["full"] * 78,
    }

    sizes = {family: sized({**config, "model_type": family}) for family in FAMILIES}

    assert all(sizing.bytes_per_token > 0 for sizing in sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILTIN_CONFIGS))
def test_arithmetic_agrees_with_the_engines_one_token_probe(name: str) -> None:
    from pdcluster_engine.model.builtin import BUILTIN
    from pdcluster_engine.model.probe import probe

    model = BUILTIN[name]()
    found = probe(model, page_size=64).layout

    assert sorted(BUILTIN_CONFIGS) == sorted(BUILTIN)
    assert found == sized(dict(BUILTIN_CONFIGS[name])).layout
    assert found == sized(model.config.to_dict()).layout
