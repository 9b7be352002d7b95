"""`PDCluster` in version v1alpha1: fields, defaults and the rules between fields.

One object describes one cluster of prefill and decode replicas. A fact that both roles must share
(model, kv, transfer, timeouts) stands once, so most mismatches cannot be written down. Parallelism
is typed because expected ranks and the fingerprint depend on it; everything else about an engine is
free in `args` and `template`. Kubernetes and the local run read the same types.

Field names are camelCase in YAML and snake_case here; unknown fields are refused. The rules between
fields are in `rules`, which `Spec` applies after its fields are right by themselves.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from pdcluster_operator.api import rules

API_VERSION = "pdcluster.dev/v1alpha1"
KIND = "PDCluster"
NAME_LENGTH_MAX = 40

Replicas = Annotated[int, Field(ge=0, le=1024)]
Seconds = Annotated[int, Field(ge=1, le=86400)]
ShortSeconds = Annotated[int, Field(ge=1, le=3600)]
Name = Annotated[str, Field(min_length=1, max_length=253)]


class Fields(BaseModel):
    """What all parts share: camelCase names, no unknown field, no silent conversion."""

    model_config = ConfigDict(
        alias_generator=to_camel, extra="forbid", frozen=True, strict=True, protected_namespaces=()
    )


class Metadata(BaseModel):
    """The part of a Kubernetes object's metadata that is read; the rest passes."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = Field(max_length=NAME_LENGTH_MAX, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    namespace: str | None = None


class Engine(Fields):
    """Which program computes; it also selects the protocol between the engines."""

    type: Literal["sglang", "vllm", "native"]
    image: str | None = Field(default=None, min_length=1, max_length=512)
    pull_secrets: Annotated[tuple[Name, ...], Field(strict=False, max_length=8)] = ()


class Model(Fields):
    """What both roles serve."""

    source: str = Field(max_length=1024, pattern=r"^(hf|pvc|file|builtin)://.+")
    revision: str | None = Field(default=None, max_length=128)
    served_name: Name | None = None
    max_context: int = Field(ge=1, le=1 << 24)
    token_secret: Name | None = None


class KV(Fields):
    """The cache: its pages, its type, when decode reserves them, how much is verified."""

    page_size: int = Field(default=64, ge=1, le=4096)
    dtype: str = Field(default="auto", min_length=1, max_length=32)
    allocation: Literal["Early", "PrefillComplete"] = "Early"
    checksum: Literal["Off", "Sampled", "Full"] | None = None
    """Absent: Full for engine native over tcp, else Off."""


class Device(Fields):
    """One NIC and the GPUs that use it."""

    nic: str = Field(min_length=1, max_length=64)
    gpus: Annotated[
        tuple[Annotated[int, Field(ge=0, le=15)], ...], Field(strict=False, max_length=16)
    ] = ()


class Transfer(Fields):
    """How KV bytes move. `rdma` means rdma: a fall-back to TCP is a failure."""

    backend: Literal["mooncake", "nixl"] = "mooncake"
    protocol: Literal["rdma", "tcp"] = "tcp"
    device_resource: Name | None = None
    device_count: int = Field(default=1, ge=1, le=16)
    devices: Annotated[tuple[Device, ...], Field(strict=False, max_length=32)] = ()
    preflight: Literal["Required", "Warn", "Skip"] = "Required"
    min_bandwidth_gb_per_second: int = Field(default=0, ge=0, le=10000, alias="minBandwidthGBps")


class Parallel(Fields):
    """Sizes of one replica; with engines sglang and native `tp` counts all ranks of one stage."""

    tp: int = Field(default=1, ge=1, le=1024)
    dp: int = Field(default=1, ge=1, le=1024)
    pp: int = Field(default=1, ge=1, le=64)
    cp: int = Field(default=1, ge=1, le=64)
    ep: int = Field(default=1, ge=1, le=1024)


class RoleSpec(Fields):
    """The replicas of one role."""

    replicas: Replicas = 1
    nodes: int = Field(default=1, ge=1, le=64)
    gpus: int = Field(default=0, ge=0, le=16)
    gpu_resource: Name = "nvidia.com/gpu"
    parallel: Parallel = Parallel()
    args: Annotated[
        tuple[Annotated[str, Field(max_length=2048)], ...], Field(strict=False, max_length=64)
    ] = ()
    template: dict[str, Any] | None = None


class Router(Fields):
    """The door: limits are those of the whole cluster, each copy takes its share."""

    replicas: int = Field(default=2, ge=1, le=64)
    policy: Literal["RoundRobin", "LeastLoaded", "PrefixAware"] = "LeastLoaded"
    max_in_flight: int = Field(default=0, ge=0, le=1 << 20)
    """0: twice what the decode replicas run at once."""
    max_queued: int = Field(default=1024, ge=0, le=1 << 20)
    retries: int = Field(default=1, ge=0, le=3)
    bypass_below_tokens: int = Field(default=0, ge=0, le=1 << 20)


class TimeoutSeconds(Fields):
    """One clock per phase; each starts with the event that it measures."""

    queue_seconds: Seconds = 60
    bootstrap_seconds: Seconds = 300
    stall_seconds: ShortSeconds = 30
    transfer_seconds: Seconds = 300
    lease_seconds: Seconds = 120
    abort_seconds: ShortSeconds = 30
    drain_seconds: Seconds = 600
    startup_seconds: Seconds = 1800


class Placement(Fields):
    """The topology domain that prefill and decode share."""

    topology_key: Name | None = None
    mode: Literal["Preferred", "Required"] = "Preferred"
    pod_group: Literal["None", "Coscheduling", "Volcano"] = "None"


class Rollout(Fields):
    """How a new fingerprint replaces an old one."""

    max_surge_pairs: int = Field(default=0, ge=0, le=64)
    max_unavailable_pairs: int = Field(default=1, ge=0, le=64)
    mode: Literal["Running", "Paused"] = "Running"


class Range(Fields):
    """Bounds of one role's replicas under autoscaling."""

    min: int = Field(ge=1, le=1024)
    max: int = Field(ge=1, le=1024)


class Scaling(Fields):
    """Ratio: prefill follows decode; Auto: both move inside their ranges."""

    mode: Literal["Ratio", "Auto"]
    prefill_per_decode: str | None = Field(
        default=None, max_length=9, pattern=r"^[1-9][0-9]{0,2}:[1-9][0-9]{0,2}$"
    )
    max_gpus: int | None = Field(default=None, ge=1, alias="maxGPUs")
    prefill: Range
    decode: Range


class Issuer(Fields):
    """A cert-manager issuer."""

    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    name: Name


class TLS(Fields):
    """Where the router's certificate comes from."""

    mode: Literal["Off", "CertManager", "Secret"] = "Off"
    secret_name: Name | None = None
    issuer: Issuer | None = None


class Security(Fields):
    """Who may talk to whom; the cluster's own key always exists."""

    network_policy: bool = True
    api_keys_secret: Name | None = None
    interop: Literal["Refuse", "Allow"] = "Refuse"
    tls: TLS = TLS()


class Spec(Fields):
    """What the user asks for."""

    engine: Engine
    model: Model
    kv: KV = KV()
    transfer: Transfer = Transfer()
    prefill: RoleSpec
    decode: RoleSpec
    router: Router = Router()
    timeouts: TimeoutSeconds = TimeoutSeconds()
    placement: Placement = Placement()
    rollout: Rollout = Rollout()
    scaling: Scaling | None = None
    security: Security = Security()

    @model_validator(mode="after")
    def _rules(self) -> Spec:
        broken = rules.broken(self)
        if broken:
            raise PydanticCustomError("rule", "{message}", {"message": "; ".join(broken)})
        return self


class PDCluster(Fields):
    """One object of kind PDCluster."""

    api_version: Literal["pdcluster.dev/v1alpha1"]
    kind: Literal["PDCluster"]
    metadata: Metadata
    spec: Spec
    status: dict[str, Any] | None = None
    """Accepted and not read, so that `kubectl get -o yaml` can be fed back."""

    @property
    def name(self) -> str:
        """The object's name; instances are named after it."""
        return self.metadata.name

    @property
    def served_name(self) -> str:
        """The model's name at the OpenAI API."""
        return self.spec.model.served_name or self.metadata.name
