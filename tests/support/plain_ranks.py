"""What a rank of SGLang says when it registers, and nothing of ours."""

from __future__ import annotations

from typing import Any

import msgspec


def plain_row(**changes: Any) -> dict[str, Any]:
    """The only rank of its server, unless something is changed."""
    row = {
        "attn_tp_size": 1,
        "attn_tp_rank": 0,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "pp_size": 1,
        "pp_rank": 0,
        "system_dp_size": 1,
        "system_dp_rank": 0,
        "rank_ip": "127.0.0.1",
        "rank_port": 9000,
        "page_size": 64,
        "kv_cache_dtype": "bfloat16",
    }
    return row | changes


def plain_body(**changes: Any) -> bytes:
    """The same as the body of its `PUT /route`."""
    return msgspec.json.encode(plain_row(**changes))


def plain_rank_body(rank: int, *, dp: int, tp: int, **changes: Any) -> bytes:
    """One rank of a server of `dp` × `tp` ranks."""
    fields = {
        "attn_tp_size": tp,
        "attn_tp_rank": rank % tp,
        "attn_dp_size": dp,
        "attn_dp_rank": rank // tp,
        "rank_port": 20000 + rank,
        "kv_cache_dtype": "auto",
    }
    return plain_body(**(fields | changes))
