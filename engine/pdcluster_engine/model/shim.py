"""The only module that calls the library's forward, so a change of its signature is a change here.

The names `cache` and `logits_to_keep` hold for the pinned minor version; another one is refused at
load, because arithmetic and cache interface may both have moved.
"""

from __future__ import annotations

import torch
import transformers
from transformers import Cache, PreTrainedModel

from pdcluster_protocol.errors import ConfigError

PINNED_MINOR = "5.24"


def require_pinned_version() -> None:
    """Refuse a library whose minor version was not tried.

    Raises:
        ConfigError: naming both versions.
    """
    installed = str(transformers.__version__)
    if installed.split(".")[:2] != PINNED_MINOR.split("."):
        raise ConfigError(
            f"transformers {installed} is installed, this engine is built for {PINNED_MINOR}.x: "
            f"pip install 'transformers~={PINNED_MINOR}.0'"
        )


def forward_one(model: PreTrainedModel, cache: Cache, token_ids: torch.Tensor) -> torch.Tensor:
    """One sequence, `token_ids` `[1, S]`; position and mask follow from the cache.

    Returns float32 logits `[vocab]` of the last token, in exactly the arithmetic of `generate`.
    """
    output = model(input_ids=token_ids, cache=cache, use_cache=True, logits_to_keep=1)
    return output.logits[0, -1].float()


def forward_batch(
    model: PreTrainedModel,
    cache: Cache,
    token_ids: torch.Tensor,
    *,
    positions: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """One token each of many sequences whose KV starts at column 0.

    Shapes: `token_ids` and `positions` `[B, 1]`, `mask` `[B, 1, 1, T]` bool, true where the row
    may look. The bool mask is right for sdpa only, which the loader asks for.
    Returns float32 logits `[B, vocab]`.
    """
    output = model(
        input_ids=token_ids,
        position_ids=positions,
        attention_mask=mask,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1].float()
