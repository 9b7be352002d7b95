"""A hello of a small engine."""

from __future__ import annotations

from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.messages import EngineHello
from pdcluster_protocol.topology import Parallelism, RankCoordinate


def greeting(incarnation: str) -> EngineHello:
    return EngineHello(
        instance="p-0",
        role="prefill",
        coordinate=RankCoordinate(),
        parallel=Parallelism(),
        layout=KVLayout(64, "float32", (Region(0, "key", 256),)),
        incarnation=incarnation,
        session="s",
        http_port=30000,
        fingerprint="f",
        allocation="Early",
        served_name="m",
        max_context=1024,
        page_count=64,
        tokenizer_digest="",
        tokenizer_files={},
    )
