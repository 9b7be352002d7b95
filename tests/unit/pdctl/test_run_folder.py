"""Slots, locks that die with their owner, and sweeping."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_protocol.errors import ConfigError
from pdctl.run_folder import (
    base_folder,
    claim,
    claim_slot,
    claim_transport_ranges,
    remove_base,
    run_folder,
    run_folders,
    sweep,
)

HOLD = """
import sys
from pathlib import Path
from pdctl.run_folder import claim
print(claim(Path(sys.argv[1]), 1) is not None, flush=True)
sys.stdin.read()
"""


def test_a_claim_excludes_others_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "slot-1.lock"
    held = claim(path, 1)
    assert held is not None
    assert claim(path, 1) is None

    held.release()

    assert not path.exists()
    again = claim(path, 1)
    assert again is not None
    again.release()


def test_a_lock_dies_with_its_owner_and_what_it_left_is_swept(tmp_path: Path) -> None:
    path = tmp_path / "slot-1.lock"
    (tmp_path / "slot-1" / "logs").mkdir(parents=True)
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert b"True\n" == owner.stdout.readline()
    assert [] == sweep(tmp_path)

    owner.kill()
    owner.wait(10)
    owner.stdin.close()
    owner.stdout.close()

    assert [tmp_path / "slot-1"] == sweep(tmp_path)
    assert [] == list(tmp_path.iterdir())


def test_a_folder_whose_lock_file_is_gone_is_swept_too(tmp_path: Path) -> None:
    (tmp_path / "slot-3").mkdir()

    assert [tmp_path / "slot-3"] == sweep(tmp_path)


def test_slots_are_handed_out_in_order_and_come_back(tmp_path: Path) -> None:
    first, second = claim_slot(tmp_path), claim_slot(tmp_path)
    assert first.number < second.number

    first.release()
    third = claim_slot(tmp_path)

    assert first.number == third.number
    for held in (second, third):
        held.release()


def test_a_slot_whose_address_is_in_use_is_passed_over(tmp_path: Path) -> None:
    first = claim_slot(tmp_path)
    first.release()
    with socket.create_server((f"127.64.{first.number}.1", 8998)):
        other = claim_slot(tmp_path)
    assert first.number < other.number
    other.release()


def test_a_slot_or_range_of_a_run_in_another_base_folder_is_passed_over(tmp_path: Path) -> None:
    """Long before anything listens there."""
    bases = tmp_path / "one", tmp_path / "other"
    for base in bases:
        base.mkdir()
    slots = [claim_slot(base) for base in bases]
    ranges = [claim_transport_ranges(b, 1, first_port=lambda n: 16000 + n)[0] for b in bases]

    assert slots[0].number != slots[1].number
    assert ranges[0].number != ranges[1].number
    for held in (*slots, *ranges):
        held.release()
    assert [] == [path for base in bases for path in base.iterdir()]


def test_transport_ranges_are_distinct(tmp_path: Path) -> None:
    ranges = claim_transport_ranges(tmp_path, 3, first_port=lambda number: 16000 + number)

    assert 3 == len({held.number for held in ranges})
    for held in ranges:
        held.release()
    assert [] == list(tmp_path.iterdir())


def test_too_many_transport_ranges_are_refused_and_given_back(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="500 engines need 500 ranges"):
        claim_transport_ranges(tmp_path, 500, first_port=lambda _number: 0)

    assert [] == list(tmp_path.iterdir())


def test_no_engine_needs_no_range(tmp_path: Path) -> None:
    assert [] == claim_transport_ranges(tmp_path, 0, first_port=lambda number: number)


def test_the_base_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    base = base_folder()

    assert tmp_path / "pdcluster" == base
    assert 0o700 == base.stat().st_mode & 0o777
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="must be a folder of yours with mode 0700"):
        base_folder()


def test_without_a_runtime_folder_the_base_names_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert tmp_path / f"pdcluster-{os.getuid()}" == base_folder()


def test_a_path_too_long_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))

    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR to a shorter one"):
        base_folder()


def test_run_folders_are_listed_by_slot(tmp_path: Path) -> None:
    for slot in (10, 2):
        run_folder(tmp_path, slot).mkdir()

    assert [2, 10] == [int(path.name.partition("-")[2]) for path in run_folders(tmp_path)]


def test_a_base_in_use_is_kept(tmp_path: Path) -> None:
    (tmp_path / "base" / "slot-1").mkdir(parents=True)
    remove_base(tmp_path / "base")
    assert (tmp_path / "base").exists()

    (tmp_path / "base" / "slot-1").rmdir()
    remove_base(tmp_path / "base")
    assert not (tmp_path / "base").exists()
