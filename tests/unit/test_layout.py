"""The folders are source roots, not packages: `operator/` must never shadow Python's own module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("protocol", "sidecar", "engine", "operator")
PACKAGES = (
    "protocol/pdcluster_protocol",
    "sidecar/pdcluster_sidecar",
    "engine/pdcluster_engine",
    "operator/pdcluster_operator",
    "operator/pdctl",
)


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_folders_are_not_packages(component: str) -> None:
    assert [] == sorted(path.name for path in (ROOT / component).glob("*.py"))


@pytest.mark.parametrize("flags", [(), ("-S",), ("-I",)], ids=["plain", "-S", "-I"])
def test_stdlib_operator_wins_at_the_repository_root(flags: tuple[str, ...]) -> None:
    program = "import collections, operator, sys; sys.stdout.write(operator.__file__)"

    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    # Inside the repository, an environment's own standard library is the only right answer.
    assert Path(done.stdout).parent != ROOT / "operator"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_a_package_has_its_init(package: str) -> None:
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}

    assert [] == sorted(
        str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()
    )
