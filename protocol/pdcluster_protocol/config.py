"""The configuration files of sidecar, router and engine, which operator and `pdctl` write.

A file is JSON of one of these structs; unknown keys are refused by name. Secrets are never in a
file: `keys_folder` is a path to a folder with one file per key id.
"""

from __future__ import annotations

import re
from typing import Literal, TypeVar

import msgspec

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.fault_plan import require_faults
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Timeouts
from pdcluster_protocol.topology import Parallelism
from pdcluster_protocol.undecodable import UNDECODABLE

ENGINE_HTTP_PORT = 30000
SIDECAR_HTTP_PORT = 8998
CONTROL_PORT = 9000
ROUTER_HTTP_PORT = 8000

Interop = Literal["Refuse", "Allow"]
Checksum = Literal["Off", "Sampled", "Full"]

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?", re.ASCII)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine process: one real DP rank with its own model, page pool and HTTP port."""

    cluster: str
    instance: str
    """The replica's name, for instance `local-prefill-0`."""
    role: Role
    host: str
    """The pod's address; the transport and the HTTP server bind to it."""
    http_port: int = ENGINE_HTTP_PORT
    """Already the port of this rank: base + dp_rank."""
    link_path: str
    """The unix socket on which the sidecar listens."""
    keys_folder: str
    interop: Interop = "Refuse"
    model_source: str
    """`builtin://tiny-glm`, `builtin://tiny-llama` or `file:///folder`."""
    served_name: str
    max_context: int
    page_size: int = 64
    dtype: str = "auto"
    """Of the cache; a plain type is also that of the weights."""
    mode: Literal["exact", "batched"] = "batched"
    chunk: int = 256
    """Prompt tokens per forward; part of the fingerprint."""
    pages: int = 0
    """Pages of the pool; 0: four times `max_context`, at most an eighth of the memory."""
    sequences: int = 16
    """Running decode sequences at most."""
    parallel: Parallelism = Parallelism()
    dp_rank: int = 0
    rank_addresses: tuple[RankAddress, ...] = ()
    """HTTP address of each DP rank of the instance; empty: our host, at the ports beside ours."""
    transport: Literal["mooncake", "local"] = "mooncake"
    transport_protocol: Literal["tcp", "rdma"] = "tcp"
    transport_port_min: int = 15000
    transport_port_max: int = 15127
    """The ports are shared evenly by the engine's ranks."""
    checksum: Checksum = "Full"
    allocation: Literal["Early", "PrefillComplete"] = "Early"
    timeouts: Timeouts = Timeouts()
    fingerprint: str = ""
    """The plan's digest of all that shapes bytes and tokens; only equal ones pair."""
    scatter_seed: int | None = None
    """Tests: hand out scattered pages instead of the longest extents."""
    check_invariants: bool = False
    """Tests: check the whole node after every event; a violation ends the process."""
    faults: str = ""
    """Tests: a plan of faults that the transport injects into its writes, or `@` and the path of a
    file with one."""
    threads: int = 1
    run_folder: str = ""
    """Locally, where the run's files live."""
    device: str = "cpu"
    """Where model and KV pages live: `cpu`, `cuda` or `cuda:N`."""

    def __post_init__(self) -> None:
        require_device_name(self.device, field="device")
        require_faults(self.faults, field="faults")


class SidecarConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One sidecar: registry, control channel, link to the ranks of its pod."""

    cluster: str
    instance: str
    role: Role
    host: str
    http_port: int = SIDECAR_HTTP_PORT
    control_port: int = CONTROL_PORT
    """Base of the ZMQ PULL ports: one per rank at base + control index."""
    link_path: str
    keys_folder: str
    interop: Interop = "Refuse"
    engine_http_port: int = ENGINE_HTTP_PORT
    """Base of the engine ports: rank d answers at base + d."""
    parallel: Parallelism = Parallelism()
    allocation: Literal["Early", "PrefillComplete"] = "Early"
    fingerprint: str = ""
    timeouts: Timeouts = Timeouts()
    model_folder: str = ""
    """Unused with engine `native`, which hands its tokenizer over the link."""
    nodes: int = 1
    """Pods of the instance; its DP ranks are spread over them evenly and in order."""
    node: int = 0
    """Which of them this one is; 0 leads."""
    leader: RankAddress | None = None
    """HTTP address of pod 0's sidecar, for all other pods."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.parallel.dp % self.nodes != 0:
            raise ConfigError(
                f"nodes is {self.nodes}; parallel.dp = {self.parallel.dp} must be a multiple of it"
            )
        if not 0 <= self.node < self.nodes:
            raise ConfigError(f"node is {self.node}; it must be in [0, {self.nodes - 1}]")
        if (self.leader is None) != (self.node == 0):
            raise ConfigError(
                f"leader is {self.leader} with node {self.node}; every pod but node 0 has one"
            )

    @property
    def control_ports(self) -> range:
        """Those of this pod's own ranks."""
        share = self.parallel.rank_count // self.nodes
        first = self.control_port + self.node * share
        return range(first, first + share)


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One replica that the router may choose."""

    instance: str
    role: Role
    host: str
    sidecar_port: int = SIDECAR_HTTP_PORT
    engine_port: int = ENGINE_HTTP_PORT
    dp: int = 1


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One router process."""

    cluster: str
    instance: str = "router-0"
    host: str = "127.0.0.1"
    port: int = ROUTER_HTTP_PORT
    admin_port: int = ROUTER_HTTP_PORT + 1
    port_shared: bool = False
    """Several router processes listen on `port` and the kernel spreads connections over them."""
    keys_folder: str
    served_name: str
    max_context: int
    members: tuple[Member, ...] = ()
    max_in_flight: int = 256
    max_queued: int = 1024
    retries: int = 1
    policy: Literal["RoundRobin", "LeastLoaded"] = "LeastLoaded"
    body_bytes_max: int = 16 << 20
    timeouts: Timeouts = Timeouts()


def require_device_name(device: str, *, field: str) -> None:
    """Refuse what names no kind of device; whether the machine has it is asked at start.

    Raises:
        ConfigError: naming the field, the value and what it may be.
    """
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"{field} is {device!r}; it is cpu, cuda or cuda:N")


ConfigT = TypeVar("ConfigT", EngineConfig, SidecarConfig, RouterConfig)


def decode_config(raw: bytes, kind: type[ConfigT], *, source: str) -> ConfigT:
    """Decode a configuration file strictly.

    Raises:
        ConfigError: naming the source, the field and what is wrong with it.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNDECODABLE as error:
        raise ConfigError(f"{source}: {error}") from error
