"""The plan is pure: a golden file, the fingerprint, and what this version cannot run yet."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from pdcluster_operator.api.reading import load_pdcluster, parse_pdcluster
from pdcluster_operator.arguments import NativeArguments, parse_native_arguments
from pdcluster_operator.place import Place, engine_count, place_locally, resolve_source
from pdcluster_operator.plan import Plan, make_plan
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.limits import Timeouts
from pdcluster_protocol.topology import Parallelism
from pdctl.plan_text import plan_yaml

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "local_plan.yaml"
PLACE = Place(
    slot=7,
    run_folder="/run/x",
    source_folder="/specs",
    router_port=8100,
    admin_port=8200,
    transport_ranges=(3, 4),
)


def planned(**sections: object) -> Plan:
    document = yaml.safe_load((ROOT / "examples/local.yaml").read_text())
    document["spec"].update(sections)
    return make_plan(parse_pdcluster(yaml.safe_dump(document).encode(), source="x.yaml"))


def test_the_plan_of_the_local_example_is_the_golden_one() -> None:
    plan = make_plan(load_pdcluster(ROOT / "examples/local.yaml"))

    assert GOLDEN.read_text() == plan_yaml(plan)


def test_the_same_spec_gives_the_same_plan() -> None:
    assert planned() == planned()


@pytest.mark.parametrize(
    "sections",
    [
        {"kv": {"pageSize": 16}},
        {"kv": {"dtype": "float32"}},
        {"kv": {"checksum": "Off"}},
        {"model": {"source": "builtin://tiny-llama", "maxContext": 8192}},
        {"prefill": {"args": ["--chunk=64"]}},
        {"decode": {"args": ["--mode", "exact"]}},
        {"decode": {"args": ["--device", "cuda"]}},
        {"decode": {"parallel": {"tp": 2, "dp": 2}}},
    ],
    ids=str,
)
def test_what_shapes_bytes_or_tokens_changes_the_fingerprint(sections: dict[str, object]) -> None:
    plan = planned(**sections)

    assert planned().fingerprint != plan.fingerprint
    everywhere = {pod.sidecar.fingerprint for pod in plan.pods} | {
        engine.fingerprint for pod in plan.pods for engine in pod.engines
    }
    assert {plan.fingerprint} == everywhere


@pytest.mark.parametrize(
    "sections",
    [
        {"prefill": {"replicas": 3}},
        {"timeouts": {"queueSeconds": 1}},
        {"router": {"replicas": 4}},
        {"decode": {"args": ["--pages=99", "--sequences=3"]}},
        {"decode": {"args": ["--scatter-seed=5", "--check-invariants"]}},
    ],
    ids=str,
)
def test_what_shapes_neither_keeps_the_fingerprint(sections: dict[str, object]) -> None:
    assert planned().fingerprint == planned(**sections).fingerprint


def test_each_dp_rank_is_an_engine_with_its_own_port() -> None:
    plan = planned(prefill={"replicas": 2}, decode={"parallel": {"tp": 2, "dp": 2}})

    assert ["local-prefill-0", "local-prefill-1", "local-decode-0"] == [
        pod.instance for pod in plan.pods
    ]
    decode = plan.pods[2]
    assert [(0, 30000), (1, 30001)] == [(e.dp_rank, e.http_port) for e in decode.engines]
    assert Parallelism(tp=2, dp=2) == decode.sidecar.parallel
    assert 4 == engine_count(plan)


def test_native_flags_and_timeouts_reach_the_engine() -> None:
    plan = planned(
        decode={"args": ["--mode=exact", "--chunk", "100", "--pages=7", "--sequences", "3"]},
        timeouts={"queueSeconds": 9},
    )

    engine = plan.pods[1].engines[0]
    assert ("exact", 100, 7, 3) == (engine.mode, engine.chunk, engine.pages, engine.sequences)
    assert Timeouts(queue_seconds=9.0) == engine.timeouts == plan.routers[0].timeouts


def test_the_device_reaches_the_engines_of_its_role_and_its_kind_the_fingerprint() -> None:
    first = planned(decode={"args": ["--device=cuda:0"]})
    second = planned(decode={"args": ["--device=cuda:1"]})

    assert ["cpu", "cuda:1"] == [e.device for pod in second.pods for e in pod.engines]
    assert first.fingerprint == second.fingerprint


def test_the_flags_for_tests_reach_the_engines_of_their_role_only() -> None:
    plan = planned(decode={"args": ["--check-invariants", "--scatter-seed", "5"]})

    seen = [(e.scatter_seed, e.check_invariants) for pod in plan.pods for e in pod.engines]
    assert [(None, False), (5, True)] == seen


def test_faults_reach_the_engines_of_their_role_only_and_not_the_fingerprint() -> None:
    plan = planned(prefill={"args": ["--faults=seed=7,FlippedByte=0.05"]})

    assert ["seed=7,FlippedByte=0.05", ""] == [e.faults for pod in plan.pods for e in pod.engines]
    assert planned().fingerprint == plan.fingerprint


def test_limits_are_those_of_the_cluster_and_each_router_takes_its_share() -> None:
    plan = planned(router={"replicas": 3, "maxInFlight": 100, "maxQueued": 10})

    assert [(34, 4)] * 3 == [(router.max_in_flight, router.max_queued) for router in plan.routers]


def test_max_in_flight_follows_from_the_decode_replicas() -> None:
    plan = planned(decode={"replicas": 2, "args": ["--sequences=5"]})

    assert 20 == plan.routers[0].max_in_flight


def test_zero_replicas_on_both_sides_is_a_suspended_plan() -> None:
    assert planned(prefill={"replicas": 0}, decode={"replicas": 0}).suspended


@pytest.mark.parametrize(
    ("expected", "sections"),
    [
        (
            "spec.engine.type is sglang",
            {"engine": {"type": "sglang"}, "model": {"source": "hf://a/b", "maxContext": 1}},
        ),
        ("spec.router.policy is PrefixAware", {"router": {"policy": "PrefixAware"}}),
        ("spec.router.bypassBelowTokens is 5", {"router": {"bypassBelowTokens": 5}}),
        ("spec.decode.nodes is 2 and spec.decode.parallel.dp is 1", {"decode": {"nodes": 2}}),
        (
            "spec.prefill.nodes is 2 and spec.prefill.parallel.dp is 3",
            {"prefill": {"nodes": 2, "parallel": {"tp": 3, "dp": 3}}},
        ),
        (
            "spec.model.source is 'builtin://huge'; there are builtin://",
            {"model": {"source": "builtin://huge", "servedName": "x", "maxContext": 64}},
        ),
        ("spec.kv.allocation is PrefillComplete", {"kv": {"allocation": "PrefillComplete"}}),
        ("spec.kv.checksum is Sampled", {"kv": {"checksum": "Sampled"}}),
        ("spec.kv.dtype is fp8_e5m2; engine native knows auto", {"kv": {"dtype": "fp8_e5m2"}}),
        ("decode's parallel.cp is 2", {"decode": {"parallel": {"tp": 2, "cp": 2}}}),
        (
            "attention TP is 3 on prefill and 2 on decode; one must divide the other",
            {"prefill": {"parallel": {"tp": 3}}, "decode": {"parallel": {"tp": 2}}},
        ),
        ("parallel.pp is 1 on prefill and 2 on decode", {"decode": {"parallel": {"pp": 2}}}),
        ("spec.security.apiKeysSecret is keys", {"security": {"apiKeysSecret": "keys"}}),
        (
            "spec.security.tls.mode is Secret",
            {"security": {"tls": {"mode": "Secret", "secretName": "s"}}},
        ),
        (
            "spec.scaling.mode is Auto",
            {
                "scaling": {
                    "mode": "Auto",
                    "prefill": {"min": 1, "max": 2},
                    "decode": {"min": 1, "max": 2},
                }
            },
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(expected: str, sections: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(**sections)

    assert expected in caught.value.detail


@pytest.mark.parametrize(
    ("expected", "args"),
    [
        ("'--colour' is unknown to engine native; it knows --mode", ["--colour=red"]),
        ("'--mod' is unknown", ["--mod=exact"]),
        ("'exact' is no flag", ["exact"]),
        ("--chunk has no value", ["--chunk"]),
        ("--chunk stands twice", ["--chunk=1", "--chunk=2"]),
        ("--chunk is '-3'; it must be a whole number", ["--chunk=-3"]),
        ("--pages is '0'", ["--pages", "0"]),
        ("--sequences is 'x'", ["--sequences=x"]),
        ("--chunk is '99999999999999'", ["--chunk=99999999999999"]),
        ("--mode is 'fast'; it is exact or batched", ["--mode=fast"]),
        ("--check-invariants has a value", ["--check-invariants=no"]),
        ("--scatter-seed is '0'", ["--scatter-seed=0"]),
        ("--device is 'gpu'; it is cpu, cuda or cuda:N", ["--device=gpu"]),
        ("--device is 'cuda:-1'", ["--device", "cuda:-1"]),
        ("--faults has no seed", ["--faults=Drop=0.1"]),
        ("--faults: 'Dorp' is no fault", ["--faults", "seed=1,Dorp=0.1"]),
    ],
)
def test_wrong_native_flags_are_refused_by_name(expected: str, args: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_native_arguments(args, field="spec.prefill.args")

    assert caught.value.detail.startswith("spec.prefill.args: ")
    assert expected in caught.value.detail


def test_no_flags_are_the_defaults() -> None:
    assert NativeArguments() == parse_native_arguments([], field="f")


def test_placing_gives_every_pod_an_address_and_every_engine_its_ports() -> None:
    placed = place_locally(planned(), PLACE)

    prefill, decode = placed.pods
    assert ("127.64.7.1", "127.64.7.2") == (prefill.sidecar.host, decode.engines[0].host)
    assert "/run/x/link-2" == decode.sidecar.link_path == decode.engines[0].link_path
    assert (15384, 15511) == (
        prefill.engines[0].transport_port_min,
        prefill.engines[0].transport_port_max,
    )
    assert 15512 == decode.engines[0].transport_port_min


def test_placing_tells_each_router_its_members_and_an_admin_port() -> None:
    placed = place_locally(planned(router={"replicas": 2}), PLACE)

    assert [(8100, 8200), (8100, 8201)] == [(r.port, r.admin_port) for r in placed.routers]
    assert all(router.port_shared for router in placed.routers)
    assert not place_locally(planned(), PLACE).routers[0].port_shared
    assert [("local-prefill-0", "127.64.7.1", 8998), ("local-decode-0", "127.64.7.2", 8998)] == [
        (member.instance, member.host, member.sidecar_port) for member in placed.routers[0].members
    ]


def test_a_replica_of_several_pods_spreads_its_ranks_over_them_and_follows_its_first() -> None:
    four = {"nodes": 2, "parallel": {"tp": 4, "dp": 4}}
    plan = planned(prefill=four)
    first, second, decode = plan.pods

    assert [("local-prefill-0", 0), ("local-prefill-0", 1), ("local-decode-0", 0)] == [
        (pod.instance, pod.node) for pod in plan.pods
    ]
    assert [[0, 1], [2, 3], [0]] == [[e.dp_rank for e in pod.engines] for pod in plan.pods]
    assert [range(9000, 9002), range(9002, 9004)] == [
        pod.sidecar.control_ports for pod in (first, second)
    ]
    assert planned(prefill={"parallel": four["parallel"]}).fingerprint == plan.fingerprint
    ranges = msgspec.structs.replace(PLACE, transport_ranges=(1, 2, 3, 4, 5))
    placed = place_locally(plan, ranges)
    assert [None, RankAddress("127.64.7.1", 8998), None] == [
        pod.sidecar.leader for pod in placed.pods
    ]
    ranks = ["127.64.7.1:30000", "127.64.7.1:30001", "127.64.7.2:30002", "127.64.7.2:30003"]
    for pod in placed.pods[:2]:
        for engine in pod.engines:
            assert ranks == [str(address) for address in engine.rank_addresses]
    assert () == decode.engines[0].rank_addresses
    assert ["local-prefill-0", "local-decode-0"] == [
        member.instance for member in placed.routers[0].members
    ]


def test_placing_changes_no_fingerprint() -> None:
    assert planned().fingerprint == place_locally(planned(), PLACE).fingerprint


def test_placing_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="slot is 255"):
        place_locally(planned(), msgspec.structs.replace(PLACE, slot=255))
    with pytest.raises(ConfigError, match="1 transport ranges for 2 engines"):
        place_locally(planned(), msgspec.structs.replace(PLACE, transport_ranges=(1,)))
    with pytest.raises(ConfigError, match="the plan has 254 pods"):
        place_locally(planned(prefill={"replicas": 253}), PLACE)


@pytest.mark.parametrize(
    ("expected", "source"),
    [
        ("builtin://tiny-glm", "builtin://tiny-glm"),
        ("file:///specs/models/a", "file://models/a"),
        ("file:///specs/models/a", "file://./models/a"),
        ("file:///models/a", "file:///models/a"),
        ("hf://a/b", "hf://a/b"),
    ],
)
def test_relative_folders_begin_at_the_yaml_file(expected: str, source: str) -> None:
    assert expected == resolve_source(source, "/specs")
