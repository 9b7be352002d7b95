"""`pdctl size`: bytes per token, pages, pool, and whether it fits, as a table of two columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pdcluster_operator.api.v1alpha1 import PDCluster
from pdcluster_operator.arguments import parse_native_arguments
from pdcluster_protocol.ids import Role
from pdcluster_protocol.sizing import Sizing, size
from pdctl.model_config import read_model_config

REFERENCE_BANDWIDTHS_GB_PER_SECOND = (1, 25, 400)


def size_table(cluster: PDCluster, source_folder: Path, *, memory_bytes: int) -> str:
    """The table; `memory_bytes` is what one DP rank may count on.

    Raises:
        ConfigError: as `sizing.size` and `read_model_config`.
    """
    spec = cluster.spec
    sizing = size(
        read_model_config(spec.model.source, source_folder),
        dtype=spec.kv.dtype,
        page_size=spec.kv.page_size,
        max_context=spec.model.max_context,
    )
    rows = [
        ("model", f"{spec.model.source} ({sizing.model_type})"),
        ("cache type", sizing.layout.dtype),
        ("regions", _regions(sizing)),
        ("bytes per token", f"{sizing.bytes_per_token:,} B"),
        ("page", f"{spec.kv.page_size} tokens, {sizing.bytes_per_page:,} B"),
        ("longest prompt", f"{sizing.max_context:,} tokens"),
        ("pages for it", f"{sizing.pages_at_max_context:,}"),
        ("bytes for it", _gigabytes(sizing.bytes_at_max_context)),
        ("transfer of it", _transfer(cluster, sizing)),
        ("memory", _gigabytes(memory_bytes)),
        *_pools(cluster, sizing, memory_bytes),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _regions(sizing: Sizing) -> str:
    """For instance `78 packed of 656 B, 21 indexer of 132 B`."""
    counted = Counter((region.kind, region.bytes_per_token) for region in sizing.layout.regions)
    return ", ".join(f"{count} {kind} of {nbytes:,} B" for (kind, nbytes), count in counted.items())


def _transfer(cluster: PDCluster, sizing: Sizing) -> str:
    floor = cluster.spec.transfer.min_bandwidth_gb_per_second
    bandwidths = (floor,) if floor else REFERENCE_BANDWIDTHS_GB_PER_SECOND
    return ", ".join(
        f"{sizing.bytes_at_max_context / (bandwidth * 1e9):.3g} s at {bandwidth} GB/s"
        for bandwidth in bandwidths
    )


def _pools(cluster: PDCluster, sizing: Sizing, memory_bytes: int) -> Iterator[tuple[str, str]]:
    """One row per role: its pool, and whether the longest prompt fits into it."""
    for role, spec in ((Role.PREFILL, cluster.spec.prefill), (Role.DECODE, cluster.spec.decode)):
        stated = 0
        if cluster.spec.engine.type == "native":
            stated = parse_native_arguments(spec.args, field=f"spec.{role}.args").pages
        pages = stated or sizing.default_pool_pages(memory_bytes)
        source = "--pages" if stated else "4 x the longest prompt, at most 1/8 of the memory"
        tokens = pages * sizing.layout.page_size
        nbytes = pages * sizing.bytes_per_page
        yield (
            f"{role} pool",
            f"{pages:,} pages, {tokens:,} tokens, {_gigabytes(nbytes)} per DP rank ({source})",
        )
        yield f"{role} fits", _verdict(sizing, pages, nbytes, memory_bytes)


def _verdict(sizing: Sizing, pages: int, pool_bytes: int, memory_bytes: int) -> str:
    if not sizing.fits(pages):
        return (
            f"no: the longest prompt needs {sizing.pages_at_max_context:,} pages, the pool has"
            f" {pages:,}; lower spec.model.maxContext or give more memory or --pages"
        )
    if pool_bytes > memory_bytes:
        return (
            f"no: the pool needs {_gigabytes(pool_bytes)}, the memory is"
            f" {_gigabytes(memory_bytes)}; lower --pages"
        )
    return f"yes, {pages // sizing.pages_at_max_context} such prompts at once"


def _gigabytes(nbytes: int) -> str:
    if nbytes < 10**9:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e9:.1f} GB"
