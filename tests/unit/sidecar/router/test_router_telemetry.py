"""What the router counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pdcluster_sidecar.router.telemetry import BUCKETS, Metrics, Phase
from pdcluster_sidecar.telemetry import utc_timestamp


def test_a_phase_falls_into_its_bucket_and_all_above() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.0011, 400.0):
        metrics.spent(Phase.QUEUE, seconds)

    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    samples = [
        sample
        for sample in families["pdcluster_phase_seconds"].samples
        if sample.labels["phase"] == Phase.QUEUE
    ]
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert len(BUCKETS) + 1 == len(buckets)
    assert [1.0, 2.0, 2.0, 3.0] == [buckets[le] for le in ("0.001", "0.0025", "300.0", "+Inf")]
    (total,) = [sample.value for sample in samples if sample.name.endswith("_sum")]
    assert abs(400.0021 - total) < 1e-9
    assert [3.0] == [sample.value for sample in samples if sample.name.endswith("_count")]


def test_a_moment_is_written_in_utc_with_microseconds() -> None:
    assert "1970-01-01T00:00:00.000001Z" == utc_timestamp(1_999)
    assert "2026-12-01T16:25:00.500000Z" == utc_timestamp(1_796_142_300_500_000_000)
