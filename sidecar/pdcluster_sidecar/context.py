"""What every part of one sidecar process shares."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from pdcluster_protocol.config import SidecarConfig
from pdcluster_protocol.limits import Limits
from pdcluster_sidecar.telemetry import Metrics


class Context(NamedTuple):
    """Configuration, bounds, and where to count and write."""

    config: SidecarConfig
    session: str
    """Random per start of this process."""
    limits: Limits
    metrics: Metrics
    log: structlog.typing.FilteringBoundLogger
