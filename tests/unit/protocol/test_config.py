"""Configuration files: strict, and wrong ones are named by file and field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_protocol.config import (
    EngineConfig,
    Member,
    RouterConfig,
    SidecarConfig,
    decode_config,
)
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import Role

ROUTER = RouterConfig(
    cluster="c",
    keys_folder="keys",
    served_name="tiny",
    max_context=64,
    members=(Member(instance="p", role=Role.PREFILL, host="h"),),
)
SIDECAR = SidecarConfig(
    cluster="c", instance="p", role=Role.DECODE, host="h", link_path="l", keys_folder="k"
)
ENGINE = EngineConfig(
    cluster="c",
    instance="p",
    role=Role.PREFILL,
    host="h",
    link_path="l",
    keys_folder="k",
    model_source="builtin://tiny-glm",
    served_name="tiny",
    max_context=64,
)


@pytest.mark.parametrize("config", [ROUTER, SIDECAR, ENGINE], ids=lambda c: type(c).__name__)
def test_what_is_written_is_read_back_equal(config: Any) -> None:
    assert config == decode_config(msgspec.json.encode(config), type(config), source="file")


def router_file(**changes: Any) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(ROUTER) | changes)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", r"router\.json: Input data was truncated"),
        (b"{", r"router\.json: "),
        (b"\xff\xfe", r"router\.json: "),
        (b"[]", r"router\.json: Expected `object`"),
        (router_file(prot=1), r"router\.json: .*unknown field `prot`"),
        (router_file(port="x"), r"router\.json: Expected `int`, got `str` - at `\$\.port`"),
        (router_file(policy="Random"), r"router\.json: .*'Random' - at `\$\.policy`"),
        (router_file(members=[{"instance": "p"}]), r"router\.json: .*members\[0\]"),
        (router_file(timeouts={"stal": 1}), r"router\.json: .*unknown field `stal`.*timeouts"),
        (router_file(timeouts={"stall_seconds": 0}), r"router\.json: timeouts\.stall_seconds is 0"),
        (b'{"cluster": "c"}', r"router\.json: Object missing required field `keys_folder`"),
        (b"[" * 100_000, r"router\.json: "),
    ],
)
def test_a_wrong_file_is_refused_by_source_and_field(raw: bytes, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        decode_config(raw, RouterConfig, source="router.json")


def test_a_wrong_parallelism_inside_a_file_names_the_file_too() -> None:
    raw = msgspec.json.encode(msgspec.to_builtins(SIDECAR) | {"parallel": {"tp": 3, "dp": 2}})

    with pytest.raises(ConfigError, match=r"sidecar\.json: parallel\.tp is 3"):
        decode_config(raw, SidecarConfig, source="sidecar.json")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:15"])
def test_a_device_is_named_as_torch_names_it(device: str) -> None:
    assert device == msgspec.structs.replace(ENGINE, device=device).device


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:1000", "CUDA", "cuda:0\n"])
def test_a_device_that_nobody_has_is_refused_by_name(device: str) -> None:
    raw = msgspec.json.encode(msgspec.to_builtins(ENGINE) | {"device": device})
    with pytest.raises(ConfigError) as caught:
        decode_config(raw, EngineConfig, source="engine.json")
    assert f"engine.json: device is {device!r}; it is cpu, cuda or cuda:N" in caught.value.detail


@pytest.mark.parametrize("faults", ["", "seed=1,Drop=0.5", "@/plans/now"])
def test_faults_are_nothing_a_plan_or_a_file(faults: str) -> None:
    assert faults == msgspec.structs.replace(ENGINE, faults=faults).faults


def test_faults_that_cannot_happen_are_refused_by_name() -> None:
    raw = msgspec.json.encode(msgspec.to_builtins(ENGINE) | {"faults": "Drop=0.5"})
    with pytest.raises(ConfigError, match=r"engine\.json: faults has no seed"):
        decode_config(raw, EngineConfig, source="engine.json")
