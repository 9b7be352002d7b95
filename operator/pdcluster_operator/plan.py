"""From a `PDCluster` to what must run: pure, so that it can be printed, compared and tested.

A plan says every process with its complete configuration, and nothing about where it runs: hosts
are empty and paths are the ones inside a pod. `place.place_locally` fills these in for processes on
one machine; rendering to pods keeps them.

The *fingerprint* is a digest of all that shapes bytes and tokens on either side (model, cache,
checksum, transfer, both roles' parallelism and native flags). It is the same in every process of
one plan, and only processes with equal fingerprints pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from pdcluster_operator import names
from pdcluster_operator.api.v1alpha1 import PDCluster, RoleSpec
from pdcluster_operator.arguments import NativeArguments, parse_native_arguments
from pdcluster_operator.supported import require_supported
from pdcluster_protocol.config import (
    ENGINE_HTTP_PORT,
    SIDECAR_HTTP_PORT,
    Checksum,
    EngineConfig,
    RouterConfig,
    SidecarConfig,
)
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Timeouts
from pdcluster_protocol.sizing import BUILTIN_CONFIGS
from pdcluster_protocol.topology import Parallelism

FINGERPRINT_VERSION = 1
LINK_PATH = "/run/pdcluster/link"
KEYS_FOLDER = "/etc/pdcluster/keys"
DECODE_FILLS = 2
"""Requests that the router lets in by default: so many times what decode runs at once, so that
prefill has work ahead of it."""


class PodPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pod: a sidecar and one engine process for each of its DP ranks."""

    instance: str
    role: Role
    ordinal: int
    node: int = 0
    """Which pod of the replica; 0 leads."""
    sidecar: SidecarConfig
    engines: tuple[EngineConfig, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must run for one object."""

    cluster: str
    fingerprint: str
    pods: tuple[PodPlan, ...]
    routers: tuple[RouterConfig, ...]

    @property
    def suspended(self) -> bool:
        """Whether both roles have no replica."""
        return not self.pods


def make_plan(cluster: PDCluster) -> Plan:
    """The plan of one object.

    Raises:
        ConfigError: for what the types allow but this version cannot run, naming the field.
    """
    require_supported(cluster)
    _require_known_model(cluster)
    arguments = {role: _arguments(cluster, role) for role in Role}
    fingerprint = _fingerprint(cluster, arguments)
    pods = tuple(
        _pod(cluster, sidecar, ordinal, arguments=arguments[role])
        for role in Role
        for ordinal in range(_role(cluster, role).replicas)
        for sidecar in _sidecars(cluster, role, ordinal, fingerprint=fingerprint)
    )
    return Plan(
        cluster=cluster.name,
        fingerprint=fingerprint,
        pods=pods,
        routers=_routers(cluster, arguments[Role.DECODE]),
    )


def checksum(cluster: PDCluster) -> Checksum:
    """The checksum in force: Full by default where our own engines use TCP."""
    kv, spec = cluster.spec.kv, cluster.spec
    if kv.checksum is not None:
        return kv.checksum
    return "Full" if spec.engine.type == "native" and spec.transfer.protocol == "tcp" else "Off"


def _role(cluster: PDCluster, role: Role) -> RoleSpec:
    return cluster.spec.prefill if role is Role.PREFILL else cluster.spec.decode


def _arguments(cluster: PDCluster, role: Role) -> NativeArguments:
    return parse_native_arguments(_role(cluster, role).args, field=f"spec.{role}.args")


def _fingerprint(cluster: PDCluster, arguments: dict[Role, NativeArguments]) -> str:
    spec = cluster.spec
    roles: dict[str, object] = {
        role: {
            "parallel": _role(cluster, role).parallel.model_dump(),
            "mode": arguments[role].mode,
            "chunk": arguments[role].chunk,
            # The kind shapes arithmetic; which one of several devices does not.
            "device": arguments[role].device.partition(":")[0],
        }
        for role in Role
    }
    return names.digest(
        {
            "version": FINGERPRINT_VERSION,
            "engine": [spec.engine.type, spec.engine.image],
            "model": [spec.model.source, spec.model.revision],
            "kv": [spec.kv.page_size, spec.kv.dtype, spec.kv.allocation, checksum(cluster)],
            "transfer": [spec.transfer.backend, spec.transfer.protocol],
            "roles": roles,
        }
    )


def _timeouts(cluster: PDCluster) -> Timeouts:
    timeouts = cluster.spec.timeouts
    return Timeouts(**{name: float(getattr(timeouts, name)) for name in Timeouts.__struct_fields__})


def _require_known_model(cluster: PDCluster) -> None:
    source = cluster.spec.model.source
    name = source.removeprefix("builtin://")
    if name != source and name not in BUILTIN_CONFIGS:
        known = ", ".join(f"builtin://{each}" for each in sorted(BUILTIN_CONFIGS))
        raise ConfigError(f"spec.model.source is {source!r}; there are {known}")


def _sidecars(
    cluster: PDCluster, role: Role, ordinal: int, *, fingerprint: str
) -> Iterator[SidecarConfig]:
    """One for each pod of a replica."""
    spec = cluster.spec
    nodes = _role(cluster, role).nodes
    for node in range(nodes):
        yield SidecarConfig(
            cluster=cluster.name,
            instance=names.instance_name(cluster.name, role, ordinal),
            role=role,
            host="",
            link_path=LINK_PATH,
            keys_folder=KEYS_FOLDER,
            interop=spec.security.interop,
            parallel=Parallelism(**_role(cluster, role).parallel.model_dump()),
            allocation=spec.kv.allocation,
            fingerprint=fingerprint,
            timeouts=_timeouts(cluster),
            nodes=nodes,
            node=node,
            leader=RankAddress("", SIDECAR_HTTP_PORT) if node else None,
        )


def _pod(
    cluster: PDCluster, sidecar: SidecarConfig, ordinal: int, *, arguments: NativeArguments
) -> PodPlan:
    share = sidecar.parallel.dp // sidecar.nodes
    engines = tuple(
        _engine(cluster, sidecar, arguments, dp_rank=dp_rank)
        for dp_rank in range(sidecar.node * share, (sidecar.node + 1) * share)
    )
    return PodPlan(
        instance=sidecar.instance,
        role=sidecar.role,
        ordinal=ordinal,
        node=sidecar.node,
        sidecar=sidecar,
        engines=engines,
    )


def _engine(
    cluster: PDCluster, sidecar: SidecarConfig, arguments: NativeArguments, *, dp_rank: int
) -> EngineConfig:
    spec = cluster.spec
    return EngineConfig(
        cluster=cluster.name,
        instance=sidecar.instance,
        role=sidecar.role,
        host="",
        http_port=ENGINE_HTTP_PORT + dp_rank,
        link_path=LINK_PATH,
        keys_folder=KEYS_FOLDER,
        interop=spec.security.interop,
        model_source=spec.model.source,
        served_name=cluster.served_name,
        max_context=spec.model.max_context,
        page_size=spec.kv.page_size,
        dtype=spec.kv.dtype,
        mode=arguments.mode,
        chunk=arguments.chunk,
        pages=arguments.pages,
        sequences=arguments.sequences,
        device=arguments.device,
        parallel=sidecar.parallel,
        dp_rank=dp_rank,
        transport="mooncake",
        transport_protocol=spec.transfer.protocol,
        checksum=checksum(cluster),
        allocation=spec.kv.allocation,
        timeouts=sidecar.timeouts,
        fingerprint=sidecar.fingerprint,
        scatter_seed=arguments.scatter_seed,
        faults=arguments.faults,
        check_invariants=arguments.check_invariants,
    )


def _policy(cluster: PDCluster) -> Literal["RoundRobin", "LeastLoaded"]:
    policy = cluster.spec.router.policy
    if policy == "PrefixAware":
        raise ConfigError(
            "spec.router.policy is PrefixAware; this version knows LeastLoaded and RoundRobin"
        )
    return policy


def _routers(cluster: PDCluster, decode: NativeArguments) -> tuple[RouterConfig, ...]:
    spec = cluster.spec
    decode_places = spec.decode.replicas * spec.decode.parallel.dp * decode.sequences
    in_flight = spec.router.max_in_flight or DECODE_FILLS * decode_places
    return tuple(
        RouterConfig(
            cluster=cluster.name,
            instance=names.router_name(cluster.name, ordinal),
            host="",
            keys_folder=KEYS_FOLDER,
            served_name=cluster.served_name,
            max_context=spec.model.max_context,
            max_in_flight=max(1, -(-in_flight // spec.router.replicas)),
            max_queued=-(-spec.router.max_queued // spec.router.replicas),
            retries=spec.router.retries,
            policy=_policy(cluster),
            timeouts=_timeouts(cluster),
        )
        for ordinal in range(spec.router.replicas)
    )
