"""What stands twice, in sidecar and engine, is the same to the letter.

Siblings never meet, so small shells that both need are twins; a repair of one must not miss the
other.
"""

from __future__ import annotations

import ast

import pytest

from support.guards import ROOT

ENGINE, SIDECAR = "engine/pdcluster_engine", "sidecar/pdcluster_sidecar"
TWINS = {
    (f"{ENGINE}/telemetry.py", f"{SIDECAR}/telemetry.py"): {
        "configure_logging",
        "utc_timestamp",
        "_utc_second",
    },
    (f"{ENGINE}/keys.py", f"{SIDECAR}/keys.py"): {"load_keys"},
    (f"{ENGINE}/http/server_log.py", f"{SIDECAR}/server_log.py"): {"ServerLog", "server_logger"},
    (f"{ENGINE}/http/connections.py", f"{SIDECAR}/connections.py"): {
        "Connections",
        "Refused",
        "_close",
    },
}


def definitions(path: str) -> dict[str, str]:
    """The source of every class and function at the top of a module, by its name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(text, node) or ""
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


@pytest.mark.parametrize("twins", TWINS, ids=lambda twins: twins[0].rpartition("/")[2])
def test_twins_are_the_same_to_the_letter(twins: tuple[str, str]) -> None:
    ours, theirs = map(definitions, twins)

    assert TWINS[twins] == {*ours} & {*theirs}
    assert {name: ours[name] for name in TWINS[twins]} == {
        name: theirs[name] for name in TWINS[twins]
    }
