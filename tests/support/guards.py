"""The house rules as functions over a tree: each returns its faults, one sentence a fault.

They take the root, so that a test can run them on this repository and on a copy with a planted
fault.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("protocol", "sidecar", "engine", "operator")
PACKAGES = (
    "protocol/pdcluster_protocol",
    "sidecar/pdcluster_sidecar",
    "engine/pdcluster_engine",
    "operator/pdcluster_operator",
    "operator/pdctl",
)
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
BANNED_WORDS = frozenset({"utils", "util", "helper", "helpers", "manager", "data", "info"})
TEXT_SUFFIXES = frozenset({".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".jinja", ""})
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|home|root|tmp|Users)/\w")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
SILENCED = re.compile(r"#\s*(?:noqa(?::\s*[A-Z0-9, ]+\b)?|type:\s*ignore(?:\[[\w, -]+\])?)(.*)$")


def python_files(root: Path, folders: tuple[str, ...]) -> Iterator[tuple[Path, str, ast.Module]]:
    """Path relative to the root, text and tree of every module below the folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield path.relative_to(root), text, ast.parse(text)


def modules_beside_packages(root: Path) -> list[str]:
    """A `.py` in a source root; `operator/__init__.py` would shadow Python's own module."""
    return [
        f"{path.relative_to(root)} lies in a source root; move it into a package"
        for component in COMPONENTS
        for path in sorted((root / component).glob("*.py"))
    ]


def shadowed_standard_library(root: Path) -> list[str]:
    """What Python says at the root; `-S` leaves out start-up files that would mask the fault."""
    program = "import collections, operator, sys; sys.stdout.write(operator.__file__)"
    faults = []
    for flags in ([], ["-S"], ["-I"]):
        done = subprocess.run(
            [sys.executable, *flags, "-c", program],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0 or Path(done.stdout).parent == root / "operator":
            faults.append(f"python {' '.join(flags)} at the root: {done.stdout}{done.stderr}")
    return faults


def missing_inits(root: Path) -> list[str]:
    """Folders of a package without `__init__.py`, which tools would treat as namespaces."""
    folders = {path.parent for package in PACKAGES for path in (root / package).rglob("*.py")}
    return [
        f"{folder.relative_to(root)} has no __init__.py"
        for folder in sorted(folders)
        if not (folder / "__init__.py").exists()
    ]


def long_files(root: Path) -> list[str]:
    return [
        f"{path} has {len(text.splitlines())} lines; at most {FILE_LINES_MAX}"
        for path, text, _ in python_files(root, (*PACKAGES, "tests", "bench"))
        if len(text.splitlines()) > FILE_LINES_MAX
    ]


def long_functions(root: Path) -> list[str]:
    return [
        f"{path}:{node.lineno} {node.name} has {length} lines; at most {FUNCTION_LINES_MAX}"
        for path, _, tree in python_files(root, (*PACKAGES, "tests", "bench"))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def missing_docstrings(root: Path) -> list[str]:
    """Every module and every public class of the packages says what it is."""
    faults = []
    for path, _, tree in python_files(root, PACKAGES):
        if ast.get_docstring(tree) is None:
            faults.append(f"{path} has no docstring")
        faults += [
            f"{path}:{node.lineno} class {node.name} has no docstring"
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node) is None
        ]
    return faults


def banned_names(root: Path) -> list[str]:
    """Modules named for nothing in particular."""
    return [
        f"{path}: name it for what it is about"
        for path, _, _ in python_files(root, PACKAGES)
        if BANNED_WORDS & set(path.stem.split("_"))
    ]


def relative_imports(root: Path) -> list[str]:
    return [
        f"{path}:{node.lineno} imports relatively"
        for path, _, tree in python_files(root, (*PACKAGES, "tests"))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def text_files(root: Path) -> Iterator[Path]:
    """Everything a person wrote; the top level and the folders, without environments and caches."""
    folders = (*COMPONENTS, "tests", "bench", "tools", "docs", "changes", "examples", ".ci")
    for path in sorted(root.iterdir()):
        if path.is_file() and path.name not in {"LICENSE", ".coverage"}:
            yield path
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def machine_paths(root: Path) -> list[str]:
    """Absolute paths of somebody's machine."""
    return [
        f"{path.relative_to(root)}:{number} names a path of one machine: {line.strip()}"
        for path in text_files(root)
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]


def unfinished_marks(root: Path) -> list[str]:
    return [
        f"{path}:{number} is unfinished: {line.strip()}"
        for path, text, _ in python_files(root, PACKAGES)
        for number, line in enumerate(text.splitlines(), start=1)
        if UNFINISHED.search(line)
    ]


def silenced_without_reason(root: Path) -> list[str]:
    """A silenced check says why: behind it or in a comment on the line before or after."""
    faults = []
    for path, text, _ in python_files(root, PACKAGES):
        lines = text.splitlines()
        for index, line in enumerate(lines):
            found = SILENCED.search(line)
            beside = lines[max(0, index - 1) : index] + lines[index + 1 : index + 2]
            explained = any(other.lstrip().startswith("#") for other in beside)
            if found and not found.group(1).strip(" #-:") and not explained:
                faults.append(f"{path}:{index + 1} silences a check without a reason")
    return faults


def sleeps_in_tests(root: Path) -> list[str]:
    """`sleep(0)` only yields and is fine; any other waits for luck."""
    return [
        f"{path}:{node.lineno} sleeps; wait for the condition with a deadline"
        for path, _, tree in python_files(root, ("tests",))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_sleep(node)
    ]


def _is_sleep(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id="sleep") | ast.Attribute(attr="sleep"):
            return not (
                len(call.args) == 1
                and isinstance(call.args[0], ast.Constant)
                and call.args[0].value == 0
            )
        case _:
            return False


def broken_import_contracts(root: Path) -> list[str]:
    """What import-linter finds in this tree, whichever tree is installed."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    paths = os.pathsep.join(str(root / component) for component in COMPONENTS)
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


LAYOUT_GUARDS: tuple[Callable[[Path], list[str]], ...] = (
    modules_beside_packages,
    shadowed_standard_library,
    missing_inits,
)
STYLE_GUARDS: tuple[Callable[[Path], list[str]], ...] = (
    long_files,
    long_functions,
    missing_docstrings,
    banned_names,
    relative_imports,
    machine_paths,
    unfinished_marks,
    silenced_without_reason,
    sleeps_in_tests,
)
