"""Live counters of a run: one line, read from the metrics of its router and engines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from pdctl.processes import RunSpec
from pdctl.web import Unreachable, exchange

SCRAPE_SECONDS = 1.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Sample = tuple[str, Mapping[str, str], float]


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the run began."""

    answered: int = 0
    others: int = 0
    """Failed, refused, or left by their client."""
    tokens: int = 0
    kv_bytes: int = 0

    def line(self, earlier: Counters, seconds: float) -> str:
        """For a terminal; rates are against `earlier`."""
        rate = (self.tokens - earlier.tokens) / seconds if seconds > 0 else 0.0
        return (
            f"requests {self.answered} answered, {self.others} not   tokens {self.tokens}"
            f" ({rate:.0f}/s)   KV moved {self.kv_bytes / 1e6:.1f} MB"
        )


def read_counters(spec: RunSpec) -> Counters:
    """Scrape every process once; one that does not answer counts nothing."""
    router = list(_scrape(f"{spec.admin}/metrics"))
    engines = [
        sample
        for process in spec.processes
        if process.kind == "engine"
        for sample in _scrape(process.ready_url.replace("/health", "/metrics"))
    ]
    answered = total(router, "pdcluster_requests_total", outcome="answered")
    return Counters(
        answered=answered,
        others=total(router, "pdcluster_requests_total") - answered,
        tokens=total(engines, "pdcluster_tokens_generated_total"),
        kv_bytes=total(engines, "pdcluster_kv_bytes_total", kind="kv"),
    )


def total(samples: Iterable[Sample], name: str, **labels: str) -> int:
    """The sum of a counter over all children with these labels."""
    return int(
        sum(
            value
            for sample, found, value in samples
            if sample == name and all(found.get(key) == want for key, want in labels.items())
        )
    )


def parse(text: str) -> Iterable[Sample]:
    """The samples of Prometheus' text format; lines that are none are passed over."""
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            yield name, dict(_LABEL.findall(labels or "")), float(value)
        except ValueError:
            continue


def _scrape(url: str) -> Iterable[Sample]:
    try:
        answer = exchange("GET", url, timeout_seconds=SCRAPE_SECONDS)
    except Unreachable:
        return []
    return parse(answer.body.decode(errors="replace")) if answer.status == 200 else []
