"""What the schema allows and this version does not run yet: refused by name, never half done.

A field that is accepted and then ignored is the worst of answers: the user believes in a cache
policy, a key or a rank that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_operator.api.v1alpha1 import KV, PDCluster, RoleSpec, Spec
from pdcluster_protocol.errors import ConfigError, LayoutMismatch
from pdcluster_protocol.ids import Role
from pdcluster_protocol.rank_mapping import KVFacts, KVKind, RankMapping
from pdcluster_protocol.sizing import NATIVE_CACHE_DTYPES
from pdcluster_protocol.topology import Parallelism


def require_supported(cluster: PDCluster) -> None:
    """Check that everything the object asks for is done.

    Raises:
        ConfigError: the first field that asks for more, its value and what to write instead.
    """
    for refusal in _refusals(cluster.spec):
        raise ConfigError(refusal)


def _refusals(spec: Spec) -> Iterator[str]:
    if spec.engine.type != "native":
        yield f"spec.engine.type is {spec.engine.type}; this version plans engine native only"
    if spec.router.bypass_below_tokens:
        yield (
            f"spec.router.bypassBelowTokens is {spec.router.bypass_below_tokens}; this version"
            " cannot bypass prefill yet: leave it at 0"
        )
    yield from _cache_refusals(spec.kv)
    if spec.security.tls.mode != "Off":
        yield f"spec.security.tls.mode is {spec.security.tls.mode}; there is no TLS yet: use Off"
    if spec.security.api_keys_secret is not None:
        yield (
            f"spec.security.apiKeysSecret is {spec.security.api_keys_secret}; no API key is"
            " checked yet: leave it out, and keep the router's port from clients it is not for"
        )
    if spec.scaling is not None:
        yield f"spec.scaling.mode is {spec.scaling.mode}; this version does not scale: set replicas"
    yield from _role_refusals(Role.PREFILL, spec.prefill)
    yield from _role_refusals(Role.DECODE, spec.decode)
    mapping = _mapping_refusal(spec)
    if mapping:
        yield mapping


def _cache_refusals(kv: KV) -> Iterator[str]:
    if kv.allocation != "Early":
        yield (
            f"spec.kv.allocation is {kv.allocation}; this version reserves decode's pages"
            " before prefill only: use Early"
        )
    if kv.dtype not in NATIVE_CACHE_DTYPES:
        yield f"spec.kv.dtype is {kv.dtype}; engine native knows {', '.join(NATIVE_CACHE_DTYPES)}"
    if kv.checksum == "Sampled":
        yield "spec.kv.checksum is Sampled; this version verifies all runs or none: use Full or Off"


def _role_refusals(role: Role, spec: RoleSpec) -> Iterator[str]:
    parallel = Parallelism(**spec.parallel.model_dump())
    if parallel.dp % spec.nodes != 0:
        yield (
            f"spec.{role}.nodes is {spec.nodes} and spec.{role}.parallel.dp is {parallel.dp}; a pod"
            " holds whole DP ranks: make dp a multiple of nodes, or use more replicas"
        )


def _mapping_refusal(spec: Spec) -> str:
    """Why the ranks of the two roles cannot meet, as far as it does not depend on the model."""
    prefill, decode = (
        Parallelism(**role.parallel.model_dump()) for role in (spec.prefill, spec.decode)
    )
    try:
        RankMapping(prefill, decode, KVFacts(KVKind.LATENT, layers=max(prefill.pp, decode.pp)))
    except LayoutMismatch as mismatch:
        return f"spec.prefill.parallel and spec.decode.parallel: {mismatch.detail}"
    return ""
