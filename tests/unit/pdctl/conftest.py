"""What the tests of `pdctl` share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_operator.api.reading import load_pdcluster
from pdcluster_operator.plan import Plan, make_plan


@pytest.fixture
def local_plan() -> Plan:
    """The plan of the local example: one prefill, one decode, one router."""
    return make_plan(load_pdcluster(Path(__file__).parents[3] / "examples/local.yaml"))
