"""The path of a request target: one meaning, the one that a proxy in front of us sees."""

from __future__ import annotations

import pytest

from pdcluster_sidecar.router.heads import path_of


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/models?limit=1", "/v1/models"),
        ("http://router:8000/v1/models?x=//", "/v1/models"),
        ("HTTPS://router/v1/models", "/v1/models"),
        ("http://router", "/"),
        ("/x://router/v1/models", "/x://router/v1/models"),
        ("//router/v1/models", "//router/v1/models"),
        ("/?u=a://b/v1/models", "/"),
    ],
)
def test_a_target_names_one_path(target: str, path: str) -> None:
    assert path == path_of(target)
