"""The rules between fields of a `PDCluster`: each names field, value and fix.

A rule is a function from a spec to the messages of what it finds broken, so that all broken rules
are reported at once. They read the spec by attribute only and import none of its types: the types
apply the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdcluster_operator.api.v1alpha1 import RoleSpec, Spec

OWNED_FLAGS = re.compile(
    r"-{1,2}("
    r"disaggregation[-_](mode|transfer[-_]backend|bootstrap[-_]port|ib[-_]device"
    r"|decode[-_]allocation[-_]policy|enable[-_]kv[-_]checksum)"
    r"|host|port|kv[-_]transfer[-_]config|page[-_]size|block[-_]size|kv[-_]cache[-_]dtype"
    r"|(tp|dp|pp|ep|cp)([-_]size)?"
    r"|(tensor|data|pipeline|decode[-_]context|prefill[-_]context)[-_]parallel[-_]size"
    r"|enable[-_]dp[-_]attention|enable[-_]expert[-_]parallel|model([-_]path)?"
    r"|served[-_]model[-_]name|context[-_]length|max[-_]model[-_]len)(=| |$)"
)
"""Flags of engines whose value this API states elsewhere."""


def broken(spec: Spec) -> list[str]:
    """The messages of all broken rules, in reading order of the spec; empty when all hold."""
    checks = (_model, _roles, _allocation, _checksum, _transfer, _timeouts, _rollout, _security)
    return [message for check in checks for message in check(spec)]


def _named_roles(spec: Spec) -> tuple[tuple[str, RoleSpec], tuple[str, RoleSpec]]:
    return (("prefill", spec.prefill), ("decode", spec.decode))


def _model(spec: Spec) -> Iterator[str]:
    if spec.engine.type != "native" and spec.model.source.startswith("builtin://"):
        yield (
            f"spec.model.source is {spec.model.source!r}: builtin models need engine.type native,"
            f" not {spec.engine.type}"
        )


def _roles(spec: Spec) -> Iterator[str]:
    if (spec.prefill.replicas == 0) != (spec.decode.replicas == 0):
        yield (
            f"spec.prefill.replicas is {spec.prefill.replicas} and spec.decode.replicas is"
            f" {spec.decode.replicas}; both must be zero (suspended) or both positive"
        )
    for name, role in _named_roles(spec):
        yield from _parallel(spec, name, role)
        for index, argument in enumerate(role.args):
            if OWNED_FLAGS.match(argument):
                yield (
                    f"spec.{name}.args[{index}] is {argument!r}: this API owns that flag"
                    " (disaggregation, kv transfer, checksum, address, page size, kv dtype,"
                    " parallelism, model, context length); set the field of the spec instead"
                )


def _parallel(spec: Spec, name: str, role: RoleSpec) -> Iterator[str]:
    sizes = role.parallel
    ranks = sizes.tp * sizes.pp
    formula = "parallel.tp * parallel.pp"
    if spec.engine.type == "vllm":
        ranks *= sizes.dp
        formula += " * parallel.dp"
    elif sizes.tp % (sizes.dp * sizes.cp) != 0:
        yield (
            f"spec.{name}.parallel.tp is {sizes.tp}; with engine {spec.engine.type} it counts all"
            f" ranks of a stage and must be a multiple of dp * cp = {sizes.dp * sizes.cp}"
        )
    if role.gpus and role.gpus * role.nodes != ranks:
        yield (
            f"spec.{name}.gpus is {role.gpus}; gpus * nodes = {role.gpus * role.nodes} must equal"
            f" {formula} = {ranks}"
        )


def _allocation(spec: Spec) -> Iterator[str]:
    if spec.kv.allocation != "PrefillComplete":
        return
    field = "spec.kv.allocation is PrefillComplete"
    if spec.engine.type == "vllm":
        yield f"{field}: engine vllm does not have it; use Early"
    if spec.transfer.backend == "nixl":
        yield f"{field}: it needs spec.transfer.backend mooncake, not nixl"
    for name, role in _named_roles(spec):
        sizes = role.parallel
        if (sizes.tp, sizes.pp, sizes.cp) != (sizes.dp, 1, 1):
            yield (
                f"{field}: it needs attention TP, CP and PP of 1 in spec.{name}.parallel"
                f" (tp == dp, cp == 1, pp == 1), not tp={sizes.tp} dp={sizes.dp} cp={sizes.cp}"
                f" pp={sizes.pp}; use Early"
            )


def _checksum(spec: Spec) -> Iterator[str]:
    known = {"native": ("Off", "Sampled", "Full"), "sglang": ("Off", "Full"), "vllm": ("Off",)}
    chosen = spec.kv.checksum
    if chosen is not None and chosen not in known[spec.engine.type]:
        yield (
            f"spec.kv.checksum is {chosen}; engine {spec.engine.type} knows"
            f" {' and '.join(known[spec.engine.type])}"
        )


def _transfer(spec: Spec) -> Iterator[str]:
    transfer = spec.transfer
    if spec.engine.type == "native" and transfer.backend != "mooncake":
        yield (f"spec.transfer.backend is {transfer.backend}; engine native needs backend mooncake")
    if transfer.protocol == "rdma" and not transfer.device_resource and not transfer.devices:
        yield (
            "spec.transfer.protocol is rdma; it needs spec.transfer.deviceResource (the device"
            " plugin's resource) or spec.transfer.devices (NIC names)"
        )


def _timeouts(spec: Spec) -> Iterator[str]:
    timeouts = spec.timeouts
    if timeouts.drain_seconds < timeouts.transfer_seconds:
        yield (
            f"spec.timeouts.drainSeconds is {timeouts.drain_seconds}; it must be at least"
            f" transferSeconds = {timeouts.transfer_seconds}, or a rollout cuts healthy rooms"
        )
    if spec.engine.type == "vllm" and timeouts.lease_seconds < timeouts.queue_seconds:
        yield (
            f"spec.timeouts.leaseSeconds is {timeouts.lease_seconds}; it must cover queueSeconds ="
            f" {timeouts.queue_seconds}, or prefill frees blocks that a queued decode still needs"
        )


def _rollout(spec: Spec) -> Iterator[str]:
    if spec.rollout.max_surge_pairs + spec.rollout.max_unavailable_pairs == 0:
        yield (
            "spec.rollout.maxSurgePairs and spec.rollout.maxUnavailablePairs are both 0; one must"
            " be positive, or no rollout can move"
        )
    scaling = spec.scaling
    if scaling is None:
        return
    for name, bounds in (("prefill", scaling.prefill), ("decode", scaling.decode)):
        if bounds.min > bounds.max:
            yield f"spec.scaling.{name}.min is {bounds.min}; it must not exceed max = {bounds.max}"
    if scaling.mode == "Ratio" and scaling.prefill_per_decode is None:
        yield "spec.scaling.mode is Ratio; it needs spec.scaling.prefillPerDecode, for instance 1:2"


def _security(spec: Spec) -> Iterator[str]:
    tls = spec.security.tls
    if tls.mode == "Secret" and tls.secret_name is None:
        yield "spec.security.tls.mode is Secret; it needs spec.security.tls.secretName"
    if tls.mode == "CertManager" and tls.issuer is None:
        yield "spec.security.tls.mode is CertManager; it needs spec.security.tls.issuer"
