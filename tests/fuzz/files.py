"""Files that people and the operator write: the object in YAML, and configurations in JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from fuzz.mutation import Parts
from fuzz.target import Target, one_part
from pdcluster_operator.api.reading import parse_pdcluster
from pdcluster_protocol.config import (
    EngineConfig,
    Member,
    RouterConfig,
    SidecarConfig,
    decode_config,
)
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import Role

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DETAIL_CHARACTERS_MAX = 4096
BOMB = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (level, level, b", ".join([b"*a%d" % (level - 1)] * 9))
    for level in range(1, 12)
)
"""Every level holds the one before it nine times: billions of items when written out."""
BOMBS = (
    (BOMB, b"apiVersion: *a11"),
    (BOMB, b"apiVersion: pdcluster.dev/v1alpha1\nkind: PDCluster\nmetadata: *a11\nspec: *a11"),
)


def check_objects(parts: Parts) -> bool:
    """An object, or one `ConfigError` of a length that a person reads."""
    try:
        parsed = parse_pdcluster(b"\n".join(parts), source="fuzz.yaml")
    except ConfigError as error:
        return _refused(error)
    dumped = parsed.model_dump(mode="json", by_alias=True)
    again = parse_pdcluster(msgspec.yaml.encode(dumped), source="again.yaml")
    assert dumped == again.model_dump(mode="json", by_alias=True)
    return True


def _refused(error: ConfigError) -> bool:
    assert len(error.detail) < DETAIL_CHARACTERS_MAX, error.detail[:200]
    return False


READERS: tuple[Callable[[bytes], msgspec.Struct], ...] = (
    lambda raw: decode_config(raw, EngineConfig, source="fuzz.json"),
    lambda raw: decode_config(raw, SidecarConfig, source="fuzz.json"),
    lambda raw: decode_config(raw, RouterConfig, source="fuzz.json"),
)
SIDECAR = SidecarConfig(
    cluster="c",
    instance="c-prefill-0",
    role=Role.PREFILL,
    host="127.64.0.1",
    link_path="link",
    keys_folder="keys",
)
CONFIGS: tuple[msgspec.Struct, ...] = (
    EngineConfig(
        cluster="c",
        instance="c-prefill-0",
        role=Role.PREFILL,
        host="127.64.0.1",
        link_path="link",
        keys_folder="keys",
        model_source="builtin://tiny-glm",
        served_name="tiny",
        max_context=4096,
        device="cuda:1",
    ),
    SIDECAR,
    RouterConfig(
        cluster="c",
        keys_folder="keys",
        served_name="tiny",
        max_context=4096,
        members=(Member(instance="c-prefill-0", role=Role.PREFILL, host="127.64.0.1"),),
    ),
)


def check_configs(parts: Parts) -> bool:
    """A configuration, which is then written and read alike, or a `ConfigError`."""
    taken = False
    for part in parts:
        for read in READERS:
            try:
                config = read(part)
            except ConfigError:
                continue
            taken = True
            assert config == read(msgspec.json.encode(config))
    return taken


OBJECTS = tuple(path.read_bytes() for path in sorted(EXAMPLES.glob("*.yaml")))
TARGETS = (
    Target("objects", (*one_part(*OBJECTS), *BOMBS), check_objects),
    Target("configs", one_part(*map(msgspec.json.encode, CONFIGS)), check_configs, weight=2),
)
