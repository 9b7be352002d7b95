"""The folders are source roots, not packages: `operator/` must never shadow Python's own module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.guards import LAYOUT_GUARDS, ROOT


@pytest.mark.parametrize("guard", LAYOUT_GUARDS, ids=lambda guard: guard.__name__)
def test_layout_has_no_faults(guard: Callable[[Path], list[str]]) -> None:
    assert [] == guard(ROOT)
