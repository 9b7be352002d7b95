"""Tiny models with seeded random weights and a byte tokenizer, made at start.

They answer nothing sensible; they exist so that every byte and every decision of a real cluster
happens with no download. The weights are wide (0.2), so that logits lie far apart and a small
difference in arithmetic does not change a token by chance.

    tiny-llama     keys and values of two heads
    tiny-qwen      Qwen3: keys and values of four heads, wider than hidden size / heads
    tiny-deepseek  DeepSeek-V3: compressed latents, a mixture of experts in groups
    tiny-glm       GLM-5: compressed latents, an indexer on *full* layers whose selection a
                   *shared* layer reuses, a mixture of experts
    tiny-glm-wide  the same with the row widths of GLM-5, so that rows can be packed

Sixteen indexer heads are the fewest without ties: scores pass a ReLU, and with few heads many are
exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pdcluster_engine.model.packing import INDEXER_WIDTH, LATENT_WIDTH, ROPE_WIDTH
from pdcluster_engine.text import TextCodec, TextConfig

END = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (
    END, PAD, "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
)  # fmt: skip
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""Every id that a model can emit is a byte or one of these, so all of them decode."""
END_ID = 256
PAD_ID = 257
MAX_CONTEXT = 32768
INDEX_TOPK = 48
"""Below the lengths that tests use, so that selection happens."""

_SEED = 20_250_401
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": END_ID,
}
_EXPERTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_codec() -> TextCodec:
    """A tokenizer with one token a byte, special tokens above them, and a small chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return TextCodec(
        tokenizer, TextConfig(chat_template=_CHAT_TEMPLATE, eos_token=END, pad_token=PAD)
    )


def tiny_glm(
    *, kv_lora_rank: int = 32, qk_rope_head_dim: int = 16, index_head_dim: int = 32
) -> PreTrainedModel:
    """Three layers of GLM-5's architecture: full, full, shared."""
    config = GlmMoeDsaConfig(
        **_COMMON,
        **_EXPERTS,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=kv_lora_rank,
        q_lora_rank=48,
        qk_rope_head_dim=qk_rope_head_dim,
        qk_nope_head_dim=16,
        v_head_dim=16,
        mlp_layer_types=["dense", "sparse", "dense"],
        indexer_types=["full", "full", "shared"],
        index_topk=INDEX_TOPK,
        index_head_dim=index_head_dim,
        index_n_heads=16,
        # Naming the padding token would zero its embedding, and with it all of its index scores.
        pad_token_id=None,
    )
    return _seeded(GlmMoeDsaForCausalLM, config)


def tiny_glm_wide() -> PreTrainedModel:
    """`tiny-glm` whose rows are as wide as those of GLM-5."""
    return tiny_glm(
        kv_lora_rank=LATENT_WIDTH, qk_rope_head_dim=ROPE_WIDTH, index_head_dim=INDEXER_WIDTH
    )


def tiny_deepseek() -> PreTrainedModel:
    """Three layers of DeepSeek-V3, the first of them dense."""
    config = DeepseekV3Config(
        **_COMMON,
        **_EXPERTS,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        pad_token_id=PAD_ID,
    )
    return _seeded(DeepseekV3ForCausalLM, config)


def tiny_qwen() -> PreTrainedModel:
    """Three layers of Qwen3 with four key and value heads, two queries each."""
    config = Qwen3Config(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        pad_token_id=PAD_ID,
    )
    return _seeded(Qwen3ForCausalLM, config)


def tiny_llama() -> PreTrainedModel:
    """Two layers with grouped heads: plain keys and values."""
    config = LlamaConfig(
        **_COMMON,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD_ID,
    )
    return _seeded(LlamaForCausalLM, config)


BUILTIN: dict[str, Callable[[], PreTrainedModel]] = {
    "tiny-deepseek": tiny_deepseek,
    "tiny-glm": tiny_glm,
    "tiny-glm-wide": tiny_glm_wide,
    "tiny-llama": tiny_llama,
    "tiny-qwen": tiny_qwen,
}


def _seeded(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The same weights in every process, and the caller's random state as it was."""
    config._attn_implementation = "sdpa"  # noqa: SLF001  The library's only name for it here.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return model_class(config)
