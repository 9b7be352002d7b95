"""A run folder that cannot be written is said, and nothing of it stays."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pdcluster_operator.plan import Plan
from pdcluster_protocol.errors import ConfigError
from pdctl.prepare import KEY_BYTES, prepare


def test_a_full_run_folder_is_named_and_leaves_no_key_behind(
    local_plan: Plan, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses longer files, as a full disk would: the key fits and no configuration does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (KEY_BYTES, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot be written: .*XDG_RUNTIME_DIR"):
            prepare(local_plan, tmp_path, source_folder=tmp_path, port=18790, admin_port=18791)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [] == list(tmp_path.iterdir())
