"""YAML to `PDCluster`: defaults, and every refusal with field, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pdcluster_operator.api.reading import load_pdcluster, parse_pdcluster
from pdcluster_operator.api.v1alpha1 import PDCluster
from pdcluster_protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]
MINIMAL = """
apiVersion: pdcluster.dev/v1alpha1
kind: PDCluster
metadata: {name: demo, labels: {team: a}}
spec:
  engine: {type: native}
  model: {source: "builtin://tiny-glm", maxContext: 4096}
  prefill: {}
  decode: {}
"""


def parsed(text: str) -> PDCluster:
    return parse_pdcluster(text.encode(), source="x.yaml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert "\n" not in caught.value.detail
    return caught.value.detail


def changed(**sections: object) -> str:
    document = yaml.safe_load(MINIMAL)
    document["spec"].update(sections)
    return yaml.safe_dump(document)


def test_a_minimal_object_gets_the_defaults() -> None:
    cluster = parsed(MINIMAL)

    assert "demo" == cluster.name == cluster.served_name
    assert (64, "auto", "Early", None) == (
        cluster.spec.kv.page_size,
        cluster.spec.kv.dtype,
        cluster.spec.kv.allocation,
        cluster.spec.kv.checksum,
    )
    assert ("mooncake", "tcp") == (cluster.spec.transfer.backend, cluster.spec.transfer.protocol)
    assert (1, 1) == (cluster.spec.prefill.replicas, cluster.spec.decode.parallel.tp)
    assert (60, 300, 30) == (
        cluster.spec.timeouts.queue_seconds,
        cluster.spec.timeouts.transfer_seconds,
        cluster.spec.timeouts.stall_seconds,
    )
    assert (2, 1024, 1) == (
        cluster.spec.router.replicas,
        cluster.spec.router.max_queued,
        cluster.spec.router.retries,
    )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_examples_are_valid(path: Path) -> None:
    assert load_pdcluster(path).kind == "PDCluster"


def test_all_fields_can_be_written() -> None:
    cluster = parsed(
        changed(
            engine={"type": "sglang", "image": "i", "pullSecrets": ["a"]},
            model={"source": "hf://a/b", "maxContext": 10, "tokenSecret": "t", "revision": "r"},
            transfer={
                "protocol": "rdma",
                "devices": [{"nic": "mlx5_0", "gpus": [0, 1]}],
                "minBandwidthGBps": 20,
                "preflight": "Warn",
            },
            prefill={"gpus": 4, "parallel": {"tp": 4}, "args": ["--x=1"], "template": {"a": 1}},
            scaling={
                "mode": "Ratio",
                "prefillPerDecode": "1:2",
                "maxGPUs": 8,
                "prefill": {"min": 1, "max": 2},
                "decode": {"min": 1, "max": 2},
            },
            security={"tls": {"mode": "CertManager", "issuer": {"name": "ca"}}},
        )
    )

    assert 20 == cluster.spec.transfer.min_bandwidth_gb_per_second
    assert (0, 1) == cluster.spec.transfer.devices[0].gpus
    assert cluster.spec.scaling is not None
    assert 8 == cluster.spec.scaling.max_gpus


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("line 2, column 6: not YAML", "a: 1\nb: [c"),
        ("line 2, column 1: not YAML: the key 'a' stands twice", "a: 1\na: 2"),
        ("holds 0 objects", ""),
        ("holds 2 objects", MINIMAL + "---" + MINIMAL),
        ("is a list; it must be a mapping", "[1]"),
        ("not YAML", "\x00"),
        ("kind is 'Pod'; it must be 'PDCluster'", MINIMAL.replace("kind: PDCluster", "kind: Pod")),
        (
            "apiVersion is 'pdcluster.dev/v9'; it must be 'pdcluster.dev/v1alpha1'",
            MINIMAL.replace("v1alpha1", "v9"),
        ),
        ("spec.engine is missing", MINIMAL.replace("engine: {type: native}", "router: {}")),
        ("metadata.name is 'A_b'", MINIMAL.replace("name: demo", "name: A_b")),
        ("metadata.name is 'aaaa", MINIMAL.replace("name: demo", f"name: {'a' * 41}")),
    ],
)
def test_a_wrong_document_is_refused_with_its_place(expected: str, text: str) -> None:
    assert expected in refusal(text)


@pytest.mark.parametrize(
    ("expected", "sections"),
    [
        ("spec.kv.pagesize is an unknown field; did you mean pageSize?", {"kv": {"pagesize": 1}}),
        ("spec.kv.zzz is an unknown field; known are allocation, checksum", {"kv": {"zzz": 1}}),
        ("spec.scheduler is an unknown field", {"scheduler": {}}),
        ("spec.kv.pageSize is 0: input should be greater", {"kv": {"pageSize": 0}}),
        ("spec.kv.pageSize is '64': input should be a valid integer", {"kv": {"pageSize": "64"}}),
        ('write "Off" in quotes', {"kv": {"checksum": False}}),
        ("spec.timeouts.queueSeconds is True", {"timeouts": {"queueSeconds": True}}),
        ("spec.engine.type is 'trt'", {"engine": {"type": "trt"}}),
        ("spec.model.source is 's3://x'", {"model": {"source": "s3://x", "maxContext": 1}}),
        ("spec.model.maxContext is missing", {"model": {"source": "hf://x"}}),
        ("spec.prefill.args[0] is 7", {"prefill": {"args": [7]}}),
        ("builtin models need engine.type native", {"engine": {"type": "vllm"}}),
        (
            "spec.prefill.replicas is 0 and spec.decode.replicas is 1; both must be",
            {"prefill": {"replicas": 0}},
        ),
        (
            "spec.decode.parallel.tp is 1; with engine native it counts all ranks of a stage",
            {"decode": {"parallel": {"dp": 2}}},
        ),
        (
            "spec.prefill.gpus is 3; gpus * nodes = 3 must equal parallel.tp * parallel.pp = 2",
            {"prefill": {"gpus": 3, "parallel": {"tp": 2}}},
        ),
        (
            "spec.prefill.args[1] is '--page_size=3': this API owns that flag",
            {"prefill": {"args": ["--mode=exact", "--page_size=3"]}},
        ),
        (
            "spec.kv.allocation is PrefillComplete: it needs attention TP",
            {"kv": {"allocation": "PrefillComplete"}, "decode": {"parallel": {"tp": 2}}},
        ),
        ("spec.transfer.backend is nixl; engine native", {"transfer": {"backend": "nixl"}}),
        ("spec.transfer.protocol is rdma; it needs", {"transfer": {"protocol": "rdma"}}),
        (
            "spec.timeouts.drainSeconds is 10; it must be at least transferSeconds = 300",
            {"timeouts": {"drainSeconds": 10}},
        ),
        ("maxUnavailablePairs are both 0", {"rollout": {"maxUnavailablePairs": 0}}),
        (
            "spec.scaling.decode.min is 3; it must not exceed max = 2",
            {
                "scaling": {
                    "mode": "Auto",
                    "prefill": {"min": 1, "max": 2},
                    "decode": {"min": 3, "max": 2},
                }
            },
        ),
        (
            "spec.scaling.mode is Ratio; it needs spec.scaling.prefillPerDecode",
            {
                "scaling": {
                    "mode": "Ratio",
                    "prefill": {"min": 1, "max": 2},
                    "decode": {"min": 1, "max": 2},
                }
            },
        ),
        ("spec.security.tls.mode is Secret", {"security": {"tls": {"mode": "Secret"}}}),
        ("spec.security.tls.mode is CertManager", {"security": {"tls": {"mode": "CertManager"}}}),
    ],
)
def test_a_wrong_field_is_refused_by_name(expected: str, sections: dict[str, object]) -> None:
    assert expected in refusal(changed(**sections))


@pytest.mark.parametrize(
    ("expected", "sections"),
    [
        ("PrefillComplete: engine vllm", {"kv": {"allocation": "PrefillComplete"}}),
        (
            "it needs spec.transfer.backend mooncake",
            {"kv": {"allocation": "PrefillComplete"}, "transfer": {"backend": "nixl"}},
        ),
        ("engine vllm knows Off", {"kv": {"checksum": "Full"}}),
        ("spec.timeouts.leaseSeconds is 5", {"timeouts": {"leaseSeconds": 5}}),
        (
            "parallel.tp * parallel.pp * parallel.dp = 4",
            {"prefill": {"gpus": 2, "parallel": {"tp": 2, "dp": 2}}},
        ),
    ],
)
def test_rules_of_engine_vllm_are_checked(expected: str, sections: dict[str, object]) -> None:
    model = {"source": "hf://a/b", "maxContext": 1}

    assert expected in refusal(changed(engine={"type": "vllm"}, model=model, **sections))


def test_several_faults_are_told_at_once_up_to_a_bound() -> None:
    wrong = dict.fromkeys(("queueSeconds", "stallSeconds", "abortSeconds", "leaseSeconds"), 0)

    assert refusal(changed(timeouts=wrong)).endswith("; and 1 more")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_pdcluster(tmp_path / "none.yaml")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="is larger than"):
        load_pdcluster(path)
