"""Benchmarks are not run here: they load, take their arguments, and add up right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.guards import ROOT


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import run

    return run


def test_every_benchmark_loads_and_can_be_run(runner: ModuleType) -> None:
    for name in runner.BENCHMARKS:
        assert callable(runner.load(name).run)


def test_names_are_checked_and_none_means_all(
    runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ["latency"] == runner.arguments(["latency"]).names
    assert [] == runner.arguments([]).names
    with pytest.raises(SystemExit) as ended:
        runner.arguments(["speed"])
    assert 2 == ended.value.code
    assert "no benchmark 'speed'; there are start, latency" in capsys.readouterr().err


def test_the_script_itself_starts_from_anywhere(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/run.py"), "--help"],
        cwd=str(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "--strict" in done.stdout


@pytest.mark.usefixtures("runner")
def test_percentiles_lie_between_neighbours() -> None:
    from bench.figures import percentile

    assert 7.0 == percentile([7.0], 95)
    assert 2.5 == percentile([4.0, 1.0, 3.0, 2.0], 50)
    assert 4.0 == percentile([4.0, 1.0, 3.0, 2.0], 100)
    assert 9.5 == percentile([float(number) for number in range(11)], 95)


@pytest.mark.usefixtures("runner")
def test_a_report_names_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.figures import Report

    report = Report()
    report.table(("what", "ms"), [("one", "1.0"), ("three", "33.0")])
    report.limit("ready after", 12.5, limit=10, unit="s")
    report.limit("memory", 60, limit=70, unit="MB")

    assert 1 == report.summary()
    printed = capsys.readouterr().out
    assert "what     ms\none     1.0\nthree  33.0\n" in printed
    assert "kept    memory: 60 of at most 70 MB" in printed
    assert printed.endswith("2 limits, 1 missed\n  MISSED  ready after: 12.5 of at most 10 s\n")


@pytest.mark.usefixtures("runner")
def test_prompts_of_built_in_models_are_a_byte_a_token_and_repeatable() -> None:
    from bench.answers import prompt_text

    assert 1000 == len(prompt_text(1000, 1).encode())
    assert prompt_text(64, 1) == prompt_text(64, 1)
    assert prompt_text(64, 1) != prompt_text(64, 2)


@pytest.mark.usefixtures("runner")
def test_a_control_time_leaves_out_what_stands_for_forward_and_transfer() -> None:
    from bench.exchange import Exchange

    times = Exchange(minted=0, begun=2_000_000, computed=52_000_000, handed_over=55_000_000)
    times.prefill_ended, times.decode_ended = 57_000_000, 56_000_000

    assert pytest.approx((0.002, 0.003, 0.002, 0.007)) == (
        times.admission,
        times.hand_over,
        times.conclusion,
        times.control,
    )


@pytest.mark.usefixtures("runner")
def test_a_storm_names_every_rank_some_twice_and_the_last_one_apart() -> None:
    from bench.registrations import STORM_RANKS, storm

    bodies, last = storm(1)

    assert STORM_RANKS - 1 == len(set(bodies))
    assert STORM_RANKS - 1 + STORM_RANKS // 4 == len(bodies)
    assert last not in bodies


@pytest.mark.usefixtures("runner")
def test_what_could_not_be_measured_is_missed_and_a_floor_is_kept_from_above(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bench.figures import Report

    report = Report()
    report.floor("requests", 1.6, floor=1.5, unit="times")
    report.floor("events", 1.4, floor=1.5, unit="times")
    report.unmeasured("all beside a peer", "it is not installed")

    assert 2 == report.summary()
    printed = capsys.readouterr().out
    assert "kept    requests: 1.6 of at least 1.5 times" in printed
    assert "MISSED  all beside a peer: not measured; it is not installed" in printed


@pytest.mark.usefixtures("runner")
def test_a_router_without_its_peer_is_judged_as_missed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench import router
    from bench.figures import Report
    from bench.router_load import Found

    run = Found(
        requests_per_second=1e6,
        events_per_second=1e6,
        p50_ms=0.1,
        p99_ms=0.1,
        cpu_us_per_request=1.0,
        cpu_us_per_event=1.0,
        failed=0,
    )
    monkeypatch.setattr(router, "PEERS", tmp_path)
    assert not router.installed()
    report = Report()
    router.judge(
        report, {(way, s.name): [run] for way in ("engine", "router") for s in router.SHAPES}
    )

    assert 1 == report.summary()
    assert f"everything beside sglang-router: not measured; {tmp_path}" in capsys.readouterr().out
