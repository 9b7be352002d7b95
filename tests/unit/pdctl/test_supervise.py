"""What the supervisor does without processes: bounding logs."""

from __future__ import annotations

from pathlib import Path

from pdctl.supervise import bound_logs


def test_a_long_log_keeps_its_newest_lines_and_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"".join(b"line %03d\n" % number for number in range(100)))

        bound_logs(tmp_path, 90)
        writer.write(b"and on\n")

    lines = path.read_text().splitlines()
    assert ["line 096", "line 097", "line 098", "line 099", "and on"] == lines


def test_a_short_log_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("short\n")

    bound_logs(tmp_path, 100)

    assert "short\n" == (tmp_path / "a.log").read_text()
