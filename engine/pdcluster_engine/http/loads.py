"""An engine's load in SGLang's words, for the routers and monitors that poll it.

`/v1/loads` is the present form. `/get_load` is the older one: `sglang-router` asks only for that,
reads `num_tokens` of each DP rank, and takes the worker for unknown without it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.messages import Load


def rank_load(config: EngineConfig, load: Load) -> dict[str, Any]:
    """One DP rank; what is not measured here (throughput) is left out."""
    total = load.pages_total * config.page_size
    used = total - load.pages_free * config.page_size
    return {
        "dp_rank": config.dp_rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.queued,
        "num_total_reqs": load.running + load.queued,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": total,
        "max_running_requests": config.sequences,
        "token_usage": used / total if total else 0.0,
        "rooms_open": load.rooms_open,
        "pages_quarantined": load.pages_quarantined,
    }


def loads_answer(
    config: EngineConfig, load: Load, *, version: str, unix_seconds: float
) -> dict[str, Any]:
    """The body of `/v1/loads`; its readers refuse a timestamp that is a number."""
    kind, _, _ = config.device.partition(":")
    return {
        "timestamp": datetime.fromtimestamp(unix_seconds, UTC).isoformat(),
        "version": version,
        "accelerator": kind,
        "num_accelerators": int(kind != "cpu"),
        "loads": [rank_load(config, load)],
    }


def older_loads_answer(config: EngineConfig, load: Load) -> list[dict[str, Any]]:
    """The body of `/get_load`."""
    seen = rank_load(config, load)
    return [
        {
            "dp_rank": config.dp_rank,
            "num_reqs": seen["num_total_reqs"],
            "num_waiting_reqs": seen["num_waiting_reqs"],
            "num_tokens": seen["num_used_tokens"],
        }
    ]
