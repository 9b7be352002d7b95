"""Style is a test: sizes, docstrings, names, imports, machine paths, sleeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.guards import ROOT, STYLE_GUARDS


@pytest.mark.parametrize("guard", STYLE_GUARDS, ids=lambda guard: guard.__name__)
def test_style_has_no_faults(guard: Callable[[Path], list[str]]) -> None:
    assert [] == guard(ROOT)
