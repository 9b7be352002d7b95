"""Key folders: what a mounted Secret looks like, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_sidecar.keys import load_keys


def test_a_mounted_secret_has_one_key_per_file(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "k1").write_bytes(b"a" * 32)
    (tmp_path / "k2").write_bytes(b"b" * 32)

    ring = load_keys(str(tmp_path))
    assert "k2" == ring.current
    assert b"a" * 32 == ring.key("k1")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys_folder is .*nowhere"):
        load_keys(str(tmp_path / "nowhere"))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is none"):
        load_keys(str(tmp_path))
