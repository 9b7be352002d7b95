"""Clocks and bounds refuse what would switch them off."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.limits import Limits, Timeouts


@pytest.mark.parametrize("name", Timeouts.__struct_fields__)
@pytest.mark.parametrize("seconds", [0, -1.5])
def test_a_clock_that_never_runs_is_refused_by_name(name: str, seconds: float) -> None:
    changes: dict[str, Any] = {name: seconds}

    with pytest.raises(ConfigError, match=rf"timeouts\.{name} is {seconds}; it must be positive"):
        Timeouts(**changes)


@pytest.mark.parametrize("kind", [Timeouts, Limits])
def test_an_unknown_name_is_refused(kind: type) -> None:
    with pytest.raises(msgspec.ValidationError, match="stal_seconds"):
        msgspec.json.decode(b'{"stal_seconds": 3}', type=kind)


def test_every_bound_is_positive_and_retransmission_is_a_range() -> None:
    limits = Limits()

    assert [] == [name for name in Limits.__struct_fields__ if getattr(limits, name) <= 0]
    assert limits.retransmit_seconds_min <= limits.retransmit_seconds_max
    assert limits.unknown_after_seconds < limits.dead_after_seconds
