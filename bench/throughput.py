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
WARM_UPS = 1


def run(report: Report) -> None:
    """Rounds of equal requests, one way after the other."""
    with running(MODEL) as cluster, ThreadPoolExecutor(PARALLEL) as pool:
        ways = {"alone": cluster.engine("decode"), "pair": cluster.spec.endpoint}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(WARM_UPS + report.times(ROUNDS)):
            for way, url in ways.items():
                before = _cpu(cluster)
                rate = _round(url, pool, seed=number)
                after = _cpu(cluster)
                if number >= WARM_UPS:
                    rates[way].append(rate)
                    cpu[way].append({name: after[name] - before[name] for name in after})
    _show(report, rates, cpu)


def _show(
    report: Report, rates: dict[str, list[float]], cpu: dict[str, list[dict[str, float]]]
) -> None:
    report.title(
        f"throughput: {MODEL}, {PARALLEL} at once, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens"
    )
    report.table(
        ("", "requests/s p50", "tokens/s p50"),
        [
            (way, f"{median(rate):.1f}", f"{median(rate) * OUTPUT_TOKENS:.0f}")
            for way, rate in rates.items()
        ],
    )
    ratio = median([two / one for one, two in zip(rates["alone"], rates["pair"], strict=True)])
    report.line(f"  pair against one process: {ratio:.2f} times the requests/s (p50 of ratios)\n")
    report.table(
        ("CPU ms a request, p50", *cpu),
        [
            (name, *(_per_request(samples, name) for samples in cpu.values()))
            for name in cpu["pair"][0]
        ],
    )


def _per_request(samples: list[dict[str, float]], name: str) -> str:
    return f"{median([sample[name] for sample in samples]) * 1000 / PARALLEL:.1f}"


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
