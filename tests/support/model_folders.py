"""Small models of any family as the folders that the library saves."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from pdcluster_engine.model.builtin import VOCAB_SIZE, byte_codec

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": [3, 256],
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def save_model(
    config: PreTrainedConfig, folder: Path, *, dtype: torch.dtype = torch.float32
) -> Path:
    """A whole model folder: weights, config, tokenizer, template."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    for name, content in byte_codec().files().items():
        (folder / name).write_bytes(content)
    return folder
