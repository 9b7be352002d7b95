"""Bodies and requests of SGLang's registry paths, as bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

from support.plain_ranks import plain_rank_body

STORM_DP, STORM_TP = 64, 64
STORM_RANKS = STORM_DP * STORM_TP
Sign = Callable[[str, str, bytes], str]
"""Method, target and body to the header of our signature."""


def body(rank: int, *, dp: int, tp: int) -> bytes:
    """The body of one rank of `dp` × `tp`, with the keys that SGLang sends."""
    return plain_rank_body(
        rank,
        dp=dp,
        tp=tp,
        kv_layout=None,
        prefill_http_port=30000,
        dsv41_spec_layout=None,
        load_balance_method="follow_bootstrap_room",
        enable_dsa_cache_layer_split=False,
        enable_kv_cache_sharding=False,
        decode_allocation_policy="early",
    )


def put(content: bytes, sign: Sign | None = None) -> bytes:
    """One registration as it goes over the wire."""
    head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(content)
    return _request("PUT", "/route", head, content, sign)


def get(dp: int, tp: int, sign: Sign | None = None) -> bytes:
    """The question for one rank's address; (-1, -1) is that for the server."""
    cp = pp = min(dp, 0)
    target = (
        f"/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
    )
    return _request("GET", target, b"", b"", sign)


def storm(seed: int) -> tuple[list[bytes], bytes]:
    """Bodies of all ranks but one, a quarter of them twice, shuffled; and that of the last one."""
    draw = random.Random(seed)
    ranks = draw.sample(range(STORM_RANKS), STORM_RANKS)
    *early, last = ranks
    doubles = draw.sample(early, STORM_RANKS // 4)
    sent = early + doubles
    draw.shuffle(sent)
    bodies = [body(rank, dp=STORM_DP, tp=STORM_TP) for rank in sent]
    return bodies, body(last, dp=STORM_DP, tp=STORM_TP)


def _request(method: str, target: str, head: bytes, content: bytes, sign: Sign | None) -> bytes:
    first = f"{method} {target} HTTP/1.1\r\nhost: registry\r\n"
    if sign is not None:
        first += f"x-pd-auth: {sign(method, target, content)}\r\n"
    return first.encode() + head + b"\r\n" + content
