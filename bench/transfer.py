"""The KV cache of a long prompt: how many bytes, how fast, and what share of the time it is.

First the transport alone, at the size of GLM-5.3 and beside bare Mooncake (`transfer_geometry`).
Then whole requests: their bytes move layer by layer while later chunks compute, so most of the
transfer costs no time of the request. What it does cost is the tail after the last chunk. The peer
is the same transport moving as many bytes with nothing else to do.
"""

from __future__ import annotations

import msgspec

from bench import transfer_geometry
from bench.answers import Timed, ask, body, prompt_text
from bench.bare_transport import bytes_per_second
from bench.cluster import Cluster, running
from bench.figures import Report, median, ms
from bench.phases import Steps, Watch, medians, process_cpu_seconds, scrape, value_sum
from pdctl.proc import descendants

MODEL = "tiny-llama"
PROMPT_TOKENS = 7168
OUTPUT_TOKENS = 2
REPEATS = 3


class Moved(msgspec.Struct, frozen=True):
    """One long prompt through the pair."""

    timed: Timed
    alone: Timed
    steps: Steps
    kv_bytes: int
    transfer_cpu_seconds: float
    """Of both transfer processes."""


def run(report: Report) -> None:
    """The transport alone, then some long prompts, each both ways."""
    transfer_geometry.run(report)
    with running(MODEL) as cluster:
        watch = Watch(cluster)
        repeats = report.times(REPEATS)
        moved = [_move(cluster, watch, seed) for seed in range(repeats)]
    report.title(f"transfer: {MODEL}, a prompt of {PROMPT_TOKENS} tokens, {repeats} times")
    kv_bytes = moved[0].kv_bytes
    bare = bytes_per_second(kv_bytes)
    steps = medians([one.steps for one in moved])
    first = median([one.timed.first_token for one in moved])
    alone = median([one.alone.first_token for one in moved])
    while_computing = steps.prefill + steps.hand_over
    report.table(
        ("", "ms p50", "share of the first token's time"),
        [
            ("into the engines", ms(steps.into), _share(steps.into, first)),
            ("prefill, KV beside it", ms(steps.prefill), _share(steps.prefill, first)),
            ("tail: last bytes, check, token", ms(steps.hand_over), _share(steps.hand_over, first)),
            ("out to the client", ms(steps.out), _share(steps.out, first)),
            ("first token of the pair", ms(first), ""),
            ("first token of one engine", ms(alone), ""),
        ],
    )
    cpu = median([one.transfer_cpu_seconds for one in moved])
    report.line(
        f"  KV bytes {kv_bytes:,} ({kv_bytes / PROMPT_TOKENS:.0f} a token), verified with xxh3"
    )
    report.line(f"  as it went, beside the forward: {kv_bytes / while_computing / 1e6:.1f} MB/s")
    report.line(
        f"  the same transport by itself: {bare / 1e6:.1f} MB/s, {ms(kv_bytes / bare)} ms for these"
        f" bytes; the tail took {steps.hand_over * bare / kv_bytes:.2f} times that"
    )
    report.line(f"  CPU of both transfer processes: {ms(cpu)} ms a prompt")


def _move(cluster: Cluster, watch: Watch, seed: int) -> Moved:
    asked = body(MODEL, prompt_text(PROMPT_TOKENS, seed), OUTPUT_TOKENS)
    alone = ask(cluster.engine("decode"), asked)
    watch.forget()
    bytes_before, cpu_before = _kv_bytes(cluster), _transfer_cpu(cluster)
    timed = ask(cluster.spec.endpoint, asked)
    return Moved(
        timed=timed,
        alone=alone,
        steps=watch.steps(timed),
        kv_bytes=_kv_bytes(cluster) - bytes_before,
        transfer_cpu_seconds=_transfer_cpu(cluster) - cpu_before,
    )


def _kv_bytes(cluster: Cluster) -> int:
    samples = scrape(f"{cluster.engine('prefill')}/metrics")
    return int(value_sum(samples, "pdcluster_kv_bytes_total", kind="kv"))


def _transfer_cpu(cluster: Cluster) -> float:
    return sum(
        process_cpu_seconds(pid)
        for role in ("prefill", "decode")
        for pid in descendants(cluster.engine_pid(role))[1:]
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"
