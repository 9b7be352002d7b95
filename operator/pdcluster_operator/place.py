"""Where the processes of a plan run on one machine: addresses, ports and paths, filled in last.

Each pod gets an address of its own in 127.64.0.0/16 (`127.64.SLOT.POD`), so every pod listens on
the standard ports, exactly as in a cluster. Only the router listens on 127.0.0.1, and only the
transport, which binds all interfaces, needs a range of ports of its own per engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from pdcluster_operator.plan import Plan, PodPlan
from pdcluster_protocol.config import EngineConfig, Member, RouterConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import RankAddress

SLOT_MAX = 254
POD_MAX = 253
TRANSPORT_PORT_MIN = 15000
TRANSPORT_PORT_COUNT = 128
"""Of one engine; its ranks share them. A fence takes two out of use for a minute."""
TRANSPORT_RANGE_COUNT = 117
"""Ranges that end below the engines' HTTP ports at 30000."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What one local run has claimed."""

    slot: int
    run_folder: str
    source_folder: str
    """Where a relative `file://` begins: the folder of the YAML file."""
    router_port: int
    admin_port: int
    """Of the first router process; the next ones follow it."""
    transport_ranges: tuple[int, ...]
    """One number of a port range per engine, in the plan's order."""


def engine_count(plan: Plan) -> int:
    """How many engine processes, and so transport ranges, a plan needs."""
    return sum(len(pod.engines) for pod in plan.pods)


def pod_address(slot: int, pod: int) -> str:
    """The address of pod `pod` (from 1) in `slot`."""
    return f"127.64.{slot}.{pod}"


def resolve_source(source: str, source_folder: str) -> str:
    """`file://` with a relative path, made absolute; every other source unchanged."""
    if not source.startswith("file://"):
        return source
    path = PurePosixPath(source.removeprefix("file://"))
    return f"file://{PurePosixPath(source_folder) / path}"


def place_locally(plan: Plan, place: Place) -> Plan:
    """The plan with every address, port and path of one local run.

    Raises:
        ConfigError: more pods than addresses, or a slot or number of ranges that does not fit.
    """
    if len(plan.pods) > POD_MAX:
        raise ConfigError(f"the plan has {len(plan.pods)} pods; one machine runs {POD_MAX} at most")
    if not 1 <= place.slot <= SLOT_MAX:
        raise ConfigError(f"slot is {place.slot}; it must be in [1, {SLOT_MAX}]")
    if len(place.transport_ranges) != engine_count(plan):
        raise ConfigError(
            f"{len(place.transport_ranges)} transport ranges for {engine_count(plan)} engines"
        )
    ranges = iter(place.transport_ranges)
    hosts = {
        (pod.instance, pod.node): pod_address(place.slot, number)
        for number, pod in enumerate(plan.pods, start=1)
    }
    pods = tuple(
        _pod(pod, number, place, hosts, tuple(next(ranges) for _ in pod.engines))
        for number, pod in enumerate(plan.pods, start=1)
    )
    routers = tuple(
        _router(router, ordinal, pods, place, shared=len(plan.routers) > 1)
        for ordinal, router in enumerate(plan.routers)
    )
    return msgspec.structs.replace(plan, pods=pods, routers=routers)


def _pod(
    pod: PodPlan,
    number: int,
    place: Place,
    hosts: Mapping[tuple[str, int], str],
    ranges: Sequence[int],
) -> PodPlan:
    folder = PurePosixPath(place.run_folder)
    host = hosts[pod.instance, pod.node]
    link_path, keys_folder = str(folder / f"link-{number}"), str(folder / "keys")
    leader = pod.sidecar.leader
    if leader is not None:
        leader = RankAddress(hosts[pod.instance, 0], leader.port)
    sidecar = msgspec.structs.replace(
        pod.sidecar, host=host, link_path=link_path, keys_folder=keys_folder, leader=leader
    )
    engines = tuple(
        msgspec.structs.replace(
            _engine(engine, place, host=host, link_path=link_path, transport_range=transport_range),
            rank_addresses=_rank_addresses(pod, hosts),
        )
        for engine, transport_range in zip(pod.engines, ranges, strict=True)
    )
    return msgspec.structs.replace(pod, sidecar=sidecar, engines=engines)


def _rank_addresses(pod: PodPlan, hosts: Mapping[tuple[str, int], str]) -> tuple[RankAddress, ...]:
    """Where the DP ranks of a replica of several pods serve; one pod's are beside each other."""
    sidecar = pod.sidecar
    if sidecar.nodes == 1:
        return ()
    share = sidecar.parallel.dp // sidecar.nodes
    return tuple(
        RankAddress(hosts[pod.instance, rank // share], sidecar.engine_http_port + rank)
        for rank in range(sidecar.parallel.dp)
    )


def _engine(
    engine: EngineConfig, place: Place, *, host: str, link_path: str, transport_range: int
) -> EngineConfig:
    port_min = TRANSPORT_PORT_MIN + transport_range * TRANSPORT_PORT_COUNT
    return msgspec.structs.replace(
        engine,
        host=host,
        link_path=link_path,
        keys_folder=str(PurePosixPath(place.run_folder) / "keys"),
        model_source=resolve_source(engine.model_source, place.source_folder),
        transport_port_min=port_min,
        transport_port_max=port_min + TRANSPORT_PORT_COUNT - 1,
        run_folder=place.run_folder,
    )


def _router(
    router: RouterConfig, ordinal: int, pods: Sequence[PodPlan], place: Place, *, shared: bool
) -> RouterConfig:
    members = tuple(
        Member(
            instance=pod.instance,
            role=pod.role,
            host=pod.sidecar.host,
            sidecar_port=pod.sidecar.http_port,
            engine_port=pod.sidecar.engine_http_port,
            dp=pod.sidecar.parallel.dp,
        )
        for pod in pods
        # The leader speaks for the whole replica.
        if pod.node == 0
    )
    return msgspec.structs.replace(
        router,
        host="127.0.0.1",
        port=place.router_port,
        admin_port=place.admin_port + ordinal,
        port_shared=shared,
        keys_folder=str(PurePosixPath(place.run_folder) / "keys"),
        members=members,
    )
