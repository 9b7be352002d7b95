"""An instance of two data-parallel ranks, and the hellos of its ranks."""

from __future__ import annotations

from typing import Any

from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.instance import InstanceNode, InstancePlan
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import EngineHello
from pdcluster_protocol.topology import Parallelism, RankCoordinate

LAYOUT = KVLayout(64, "bfloat16", (Region(0, "key", 128), Region(0, "value", 128)))
TWO = Parallelism(tp=2, dp=2)


def plan(**changes: Any) -> InstancePlan:
    fields: dict[str, Any] = {
        "cluster": "c",
        "instance": "c-prefill-0",
        "role": Role.PREFILL,
        "parallel": TWO,
        "allocation": "Early",
        "fingerprint": "f",
        "http": RankAddress("127.64.0.1", 8998),
        "control_port": 9000,
        "session": "s",
    }
    return InstancePlan(**(fields | changes))


def hello(dp: int = 0, **changes: Any) -> EngineHello:
    fields: dict[str, Any] = {
        "instance": "c-prefill-0",
        "role": "prefill",
        "coordinate": RankCoordinate(dp=dp),
        "parallel": TWO,
        "layout": LAYOUT,
        "incarnation": "",
        "session": f"engine-{dp}",
        "http_port": 30000 + dp,
        "fingerprint": "f",
        "allocation": "Early",
        "served_name": "tiny",
        "max_context": 4096,
        "page_count": 64,
        "tokenizer_digest": "t",
        "tokenizer_files": {"tokenizer.json": b"{}"},
    }
    return EngineHello(**(fields | changes))


def instance(**changes: Any) -> InstanceNode:
    return InstanceNode(plan(**changes), Limits())
