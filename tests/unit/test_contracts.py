"""Import contracts hold, and every guard is seen to fail on a copy with a planted fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support import guards

Guard = Callable[[Path], list[str]]

LONG_FUNCTION = "def endless() -> None:\n" + "    pass\n" * 60

# A guard, the file that gets the fault, and the fault.
PLANTED: tuple[tuple[Guard, str, str], ...] = (
    (guards.modules_beside_packages, "operator/__init__.py", ""),
    (guards.shadowed_standard_library, "operator/__init__.py", ""),
    (guards.missing_inits, "protocol/pdcluster_protocol/lost/found.py", '"""Lost."""\n'),
    (guards.long_files, "protocol/pdcluster_protocol/ids.py", "\n" * 401),
    (guards.long_functions, "protocol/pdcluster_protocol/ids.py", LONG_FUNCTION),
    (guards.missing_docstrings, "protocol/pdcluster_protocol/ids.py", "class Bare:\n    x = 1\n"),
    (guards.banned_names, "sidecar/pdcluster_sidecar/http_utils.py", '"""Anything."""\n'),
    (guards.relative_imports, "protocol/pdcluster_protocol/ids.py", "from . import errors\n"),
    (guards.machine_paths, "docs/design.md", "see /" + "home/someone/notes\n"),
    (guards.unfinished_marks, "protocol/pdcluster_protocol/ids.py", "# TO" + "DO: later\n"),
    (
        guards.silenced_without_reason,
        "protocol/pdcluster_protocol/ids.py",
        "x = 1  # no" + "qa: E501\n",
    ),
    (guards.sleeps_in_tests, "tests/unit/test_new.py", "import time\ntime." + "sleep(1)\n"),
)

PURE = "The protocol does no I/O"
MEET = "Components meet only in the protocol"

# The file that gets the import, the import, and how the contract that must break begins.
PLANTED_IMPORTS = (
    ("protocol/pdcluster_protocol/ids.py", "import time", PURE),
    ("protocol/pdcluster_protocol/push/__init__.py", "import logging", PURE),
    (
        "protocol/pdcluster_protocol/ids.py",
        "from pdcluster_protocol import push",
        "Shared rules know no dialect",
    ),
    ("sidecar/pdcluster_sidecar/__init__.py", "import pdcluster_engine", MEET),
    ("operator/pdctl/__init__.py", "import pdcluster_sidecar", "The command line starts"),
    ("sidecar/pdcluster_sidecar/__init__.py", "import kubernetes", "Only the operator"),
    ("sidecar/pdcluster_sidecar/__init__.py", "import httptools", "Only the byte paths"),
    ("sidecar/pdcluster_sidecar/__init__.py", "import torch", "Only the engine may import torch"),
    ("engine/pdcluster_engine/__init__.py", "import mooncake.engine", "Only the transport may"),
    ("engine/pdcluster_engine/transport/__init__.py", "import torch", "The transport needs no"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the guards read."""
    for folder in (*guards.COMPONENTS, "docs"):
        shutil.copytree(
            guards.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    shutil.copy(guards.ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(root: Path, where: str, fault: str) -> None:
    path = root / where
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(fault)


def test_import_contracts_hold() -> None:
    assert [] == guards.broken_import_contracts(guards.ROOT)


def test_every_guard_is_seen_to_fail() -> None:
    assert {*guards.LAYOUT_GUARDS, *guards.STYLE_GUARDS} == {guard for guard, _, _ in PLANTED}


@pytest.mark.parametrize(
    ("guard", "where", "fault"), PLANTED, ids=[guard.__name__ for guard, _, _ in PLANTED]
)
def test_guard_fails_on_a_planted_fault(tree: Path, guard: Guard, where: str, fault: str) -> None:
    before = guard(tree)

    plant(tree, where, fault)

    assert len(before) < len(guard(tree))


@pytest.mark.parametrize(
    ("where", "fault", "contract"),
    PLANTED_IMPORTS,
    ids=[f"{fault} in {where}" for where, fault, _ in PLANTED_IMPORTS],
)
def test_import_contract_fails_on_a_planted_import(
    tree: Path, where: str, fault: str, contract: str
) -> None:
    plant(tree, where, f"\n{fault}\n")

    (report,) = guards.broken_import_contracts(tree)

    broken = [line for line in report.splitlines() if " BROKEN" in line]
    assert [True] == [line.startswith(contract) for line in broken]
