"""First token and time per token: one engine asked directly, against the pair behind the router.

Both ways are asked in turn in the same cluster, so noise of the machine meets both. The engine that
answers alone is the one that decodes for the pair.
"""

from __future__ import annotations

import msgspec

from bench.answers import Timed, ask, body, prompt_text
from bench.cluster import Cluster, running
from bench.figures import Report, median, ms, percentile
from bench.phases import Steps, Watch, medians

MODELS = ("tiny-glm", "tiny-llama")
PROMPT_TOKENS = (64, 1000)
OUTPUT_TOKENS = 64
PAIRS = 31
WARM_UPS = 3
FIRST_TOKEN_MS_MAX = 30.0
PER_TOKEN_RATIO_MAX = 1.1


class Run(msgspec.Struct, frozen=True):
    """One question, asked both ways."""

    alone: Timed
    pair: Timed
    steps: Steps
    alone_into: float
    """Until the engine that answers alone had admitted it."""
    alone_compute: float
    """From there to its first token."""


def run(report: Report) -> None:
    """All models and prompt lengths."""
    for model in MODELS:
        with running(model) as cluster:
            for tokens in PROMPT_TOKENS:
                _measure(report, cluster, model, tokens)


def _measure(report: Report, cluster: Cluster, model: str, tokens: int) -> None:
    watch = Watch(cluster)
    pairs = report.times(PAIRS)
    for seed in range(WARM_UPS):
        _ask_both(cluster, watch, body(model, prompt_text(tokens, seed), OUTPUT_TOKENS))
    runs = [
        _ask_both(cluster, watch, body(model, prompt_text(tokens, seed), OUTPUT_TOKENS))
        for seed in range(WARM_UPS, WARM_UPS + pairs)
    ]
    what = f"{model}, {tokens} + {OUTPUT_TOKENS} tokens"
    report.title(f"latency: {what}, {pairs} times alone and as a pair in turn")
    _table(report, runs)
    _phases(report, runs)
    alone = [run.alone.first_token for run in runs]
    pair = [run.pair.first_token for run in runs]
    ratio = median([run.pair.per_token / run.alone.per_token for run in runs])
    for percent in (50, 95):
        # A disturbance hits one of the two ways; percentiles of differences would count it twice.
        figure = 1000 * (percentile(pair, percent) - percentile(alone, percent))
        name = f"{what}: first token, p{percent} of pair less that of alone"
        report.limit(name, figure, limit=FIRST_TOKEN_MS_MAX, unit="ms")
    report.limit(
        f"{what}: time per token, p50 of ratios", ratio, limit=PER_TOKEN_RATIO_MAX, unit="times"
    )
    same = sum(run.alone.text == run.pair.text for run in runs)
    report.line(f"  same text both ways: {same} of {len(runs)}")


def _ask_both(cluster: Cluster, watch: Watch, asked: dict[str, object]) -> Run:
    watch.forget()
    alone = ask(cluster.engine("decode"), asked)
    leg = watch.leg("decode")
    watch.forget()
    pair = ask(cluster.spec.endpoint, asked)
    return Run(
        alone=alone,
        pair=pair,
        steps=watch.steps(pair),
        alone_into=leg.admitted - alone.sent_at,
        alone_compute=leg.first_token - leg.admitted,
    )


def _table(report: Report, runs: list[Run]) -> None:
    rows = []
    for name, timed in (("alone", [r.alone for r in runs]), ("pair", [r.pair for r in runs])):
        first = [answer.first_token for answer in timed]
        each = [answer.per_token for answer in timed]
        rows.append(
            (
                name,
                ms(median(first)),
                ms(percentile(first, 95)),
                f"{1000 * median(each):.2f}",
                f"{1000 * percentile(each, 95):.2f}",
            )
        )
    report.table(("ms", "first token p50", "p95", "per token p50", "p95"), rows)


def _phases(report: Report, runs: list[Run]) -> None:
    steps = medians([run.steps for run in runs])
    alone_into = median([run.alone_into for run in runs])
    alone_compute = median([run.alone_compute for run in runs])
    alone_out = median([run.alone.first_token - run.alone_into - run.alone_compute for run in runs])
    report.table(
        ("to the first token, ms p50", "alone", "pair"),
        [
            ("into the engine(s)", ms(alone_into), ms(steps.into)),
            ("handshake, prefill, KV beside it", ms(alone_compute), ms(steps.prefill)),
            ("hand-over: last bytes, check, token", "", ms(steps.hand_over)),
            ("out to the client", ms(alone_out), ms(steps.out)),
        ],
    )
