"""Names and hashes that are derived from a `PDCluster`, in one place so that all agree.

A child's name depends on its parent and its place alone: the same spec always yields the same
names, which makes creating a child twice impossible rather than unlikely.
"""

from __future__ import annotations

import hashlib

import msgspec

from pdcluster_protocol.ids import Role

DIGEST_LENGTH = 16


def instance_name(cluster: str, role: Role, ordinal: int) -> str:
    """The name of one replica, for instance `demo-prefill-0`."""
    return f"{cluster}-{role}-{ordinal}"


def router_name(cluster: str, ordinal: int) -> str:
    """The name of one router process."""
    return f"{cluster}-router-{ordinal}"


def digest(facts: dict[str, object]) -> str:
    """16 hex digits over facts; the order of keys does not matter."""
    encoded = msgspec.json.encode(facts, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:DIGEST_LENGTH]
