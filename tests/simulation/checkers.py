"""What must be true of a world when it has come to rest."""

from __future__ import annotations

from pdcluster_protocol import invariants
from simulation.world import World


def check_rest(world: World) -> None:
    """One end per leg, no wrong byte read or written, nothing left anywhere."""
    assert [] == world.violations
    for request in world.requests.values():
        for name in request.legs:
            ends = request.ends[name]
            assert len(ends) == 1, f"{request.key} has {len(ends)} ends on {name}: {ends}"
        if request.ends["decode"] == [None]:
            assert request.decoded
    for pod in world.pods.values():
        invariants.check_idle(pod.node)
