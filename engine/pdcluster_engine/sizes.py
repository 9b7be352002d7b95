"""How large the page pool and the metadata table of an engine are."""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout

CONTEXTS_BY_DEFAULT = 4
MEMORY_SHARE = 8
"""The pool takes at most one part in so many."""
SLOTS_PER_SEQUENCE = 4


def page_count(config: EngineConfig, layouts: Sequence[KVLayout], *, memory_bytes: int) -> int:
    """The pages of the pool: as configured, else four contexts, at most an eighth of the memory.

    `layouts` are those of the engine's ranks, each of which has all pages in an arena of its own.

    Raises:
        ConfigError: the pool cannot hold one request of `max_context` tokens.
    """
    page_size = layouts[0].page_size
    needed = layouts[0].pages_for(config.max_context)
    page_bytes = sum(layout.bytes_per_token for layout in layouts) * page_size
    if config.pages:
        if config.pages < needed:
            raise ConfigError(
                f"pages is {config.pages}; max_context {config.max_context} needs {needed} pages of"
                f" {page_size} tokens: raise pages or lower max_context"
            )
        return config.pages
    affordable = memory_bytes // MEMORY_SHARE // page_bytes
    if affordable < needed:
        raise ConfigError(
            f"max_context is {config.max_context}, which needs {needed} pages of {page_bytes} bytes"
            f" each; an eighth of the memory holds {affordable}: lower max_context or set pages"
        )
    return min(CONTEXTS_BY_DEFAULT * needed, affordable)


def slot_count(config: EngineConfig) -> int:
    """Metadata slots: more than run at once, since a slot is taken from admission on."""
    return SLOTS_PER_SEQUENCE * config.sequences


def check_context(config: EngineConfig, *, model_max: int) -> None:
    """Refuse a context that the model was not made for.

    Raises:
        ConfigError: naming both numbers.
    """
    if not 1 <= config.max_context <= model_max:
        raise ConfigError(
            f"max_context is {config.max_context}; {config.model_source} takes 1 to {model_max}"
        )
