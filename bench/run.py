"""`make bench`: each benchmark prints figures against a limit, or a peer of the same run.

    bench/run.py                    all of them, some ten minutes
    bench/run.py latency transfer   these
    bench/run.py --strict           exit code 1 when a limit was missed
    bench/run.py --quick            try that it runs

Figures of a busy machine are noisy; ratios of ways that were asked in turn bear it best.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

BENCHMARKS = ("start", "latency", "throughput", "transfer", "router", "control", "registry")
ROOT = Path(__file__).resolve().parents[1]
IMPORTED_FROM = (ROOT, ROOT / "tests")
"""Beside what is installed: the benchmarks, and what they share with tests."""


class Benchmark(Protocol):
    """A module of this folder."""

    def run(self, report: object) -> None:
        """Measure and print."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py", description="Measure PDCluster on this machine."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 on a missed limit")
    parser.add_argument(
        "--quick", action="store_true", help="repeat hardly anything: the figures mean nothing"
    )
    parsed = parser.parse_args(argv)
    for name in parsed.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    return parsed


def load(name: str) -> Benchmark:
    """The module of a benchmark; found from wherever this script was started."""
    sys.path += [str(each) for each in IMPORTED_FROM if str(each) not in sys.path]
    return cast("Benchmark", importlib.import_module(f"bench.{name}"))


def main(argv: Sequence[str] | None = None) -> int:
    asked = arguments(argv)
    names = asked.names or BENCHMARKS
    benchmarks = [load(name) for name in names]
    from bench.figures import Report

    report = Report(quick=asked.quick)
    load_average = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    report.line(f"{os.cpu_count()} cores, load average before: {load_average}")
    started = time.monotonic()
    for benchmark in benchmarks:
        benchmark.run(report)
    report.line(f"\n{time.monotonic() - started:.0f} s in all")
    missed = report.summary()
    return 1 if asked.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
