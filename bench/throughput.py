"""Sixteen requests at once: the pair behind the router against one engine, in turn.

The pair has two engine processes, so on an otherwise idle machine with two cores it may win. There
is no limit here; the figure is reported.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from bench.answers import ask_whole, body, prompt_text
from bench.cluster import Cluster, running
from bench.figures import Report, median
from bench.phases import process_cpu_seconds

MODEL = "tiny-glm"
PARALLEL = 16
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64
ROUNDS = 5


def run(report: Report) -> None:
    """Rounds of equal requests, one way after the other."""
    with running(MODEL) as cluster, ThreadPoolExecutor(PARALLEL) as pool:
        report.title(
            f"throughput: {MODEL}, {PARALLEL} at once, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens"
        )
        _round(cluster.spec.endpoint, pool, seed=0)
        _round(cluster.engine("decode"), pool, seed=0)
        alone, pair, cpu = [], [], []
        for number in range(1, ROUNDS + 1):
            alone.append(_round(cluster.engine("decode"), pool, seed=number))
            before = _cpu(cluster)
            pair.append(_round(cluster.spec.endpoint, pool, seed=number))
            cpu.append({name: after - before[name] for name, after in _cpu(cluster).items()})
        report.table(
            ("", "requests/s p50", "tokens/s p50"),
            [
                (name, f"{rate:.1f}", f"{rate * OUTPUT_TOKENS:.0f}")
                for name, rate in (("alone", median(alone)), ("pair", median(pair)))
            ],
        )
        ratio = median([two / one for one, two in zip(alone, pair, strict=True)])
        report.line(f"  pair against one process: {ratio:.2f} times the requests/s (p50 of ratios)")
        report.line("  CPU of a round of the pair, ms a request:")
        for name in cpu[0]:
            spent = median([sample[name] for sample in cpu]) * 1000 / PARALLEL
            report.line(f"    {name}: {spent:.1f}")


def _round(url: str, pool: ThreadPoolExecutor, *, seed: int) -> float:
    """Requests per second of one round."""
    asked = [
        body(MODEL, prompt_text(PROMPT_TOKENS, seed * PARALLEL + index), OUTPUT_TOKENS)
        for index in range(PARALLEL)
    ]
    started = time.monotonic()
    list(pool.map(lambda one: ask_whole(url, one), asked))
    return PARALLEL / (time.monotonic() - started)


def _cpu(cluster: Cluster) -> dict[str, float]:
    return {
        process.name: process_cpu_seconds(process.pid)
        for process in cluster.state.processes
        if process.pid and process.name != "nursery"
    }
