"""The door of the engine: what is refused before it reaches the owner thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_engine.native import NativeEngine
from pdcluster_protocol.errors import Reason, RequestFailed
from pdcluster_protocol.ids import Key, mint_attempt
from support.owner import Bench, submission
from support.sinks import Collected

NOW_MILLISECONDS = 1_800_000_000_000


def test_an_attempt_far_ahead_of_the_wall_clock_is_refused_with_the_fix(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path / "link"))
    engine = NativeEngine(
        inbox=bench.inbox,
        legs=bench.legs,
        loop=bench.loop,
        wall_clock=lambda: NOW_MILLISECONDS * 1_000_000,
    )
    near = Key(7, mint_attempt(NOW_MILLISECONDS + 50_000, 1))
    far = Key(8, mint_attempt(NOW_MILLISECONDS + 90_000, 1))
    engine.submit(submission(near, "near"), Collected())

    with pytest.raises(RequestFailed, match=r"90 s ahead .* set the router's clock") as caught:
        engine.submit(submission(far, "far"), Collected())
    assert Reason.STALE_ATTEMPT is caught.value.reason
    assert 1 == len(bench.legs)
