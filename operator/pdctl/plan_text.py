"""A plan as YAML: for reading, and for a golden file that a reviewer can compare."""

from __future__ import annotations

import msgspec
import yaml

from pdcluster_operator.plan import Plan


def plan_yaml(plan: Plan) -> str:
    """The plan in the order of its fields."""
    return yaml.safe_dump(msgspec.to_builtins(plan), sort_keys=False, width=100)
