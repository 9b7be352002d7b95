"""A replica of two pods: two real sidecars, and engines that only speak the link."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdcluster_protocol.ids import Role
from pdcluster_protocol.topology import Parallelism, RankCoordinate
from support.sidecars import FakeEngine, SidecarProcess

TWO = Parallelism(tp=2, dp=2)


class Instance:
    """A replica of two pods with one rank each."""

    def __init__(self, folder: Path, role: Role) -> None:
        fields = {"instance": f"c-{role}-0", "parallel": TWO, "nodes": 2}
        self.leader = SidecarProcess(folder / "0", role, **fields)
        self.other = SidecarProcess(folder / "1", role, node=1, leader=self.leader.http, **fields)
        self.engines: list[FakeEngine] = []

    def engine(self, dp: int, incarnation: str = "") -> FakeEngine:
        config = (self.leader, self.other)[dp].config
        place = RankCoordinate(dp=dp)
        earlier = sum(engine.hello.coordinate == place for engine in self.engines)
        engine = FakeEngine(
            config,
            coordinate=place,
            http_port=30000 + dp,
            # Every process has a session of its own.
            session=f"engine-{dp}" + f"-{earlier}" * (earlier > 0),
            incarnation=incarnation,
        )
        self.engines.append(engine)
        return engine

    async def join(self, incarnation: str = "") -> tuple[FakeEngine, FakeEngine]:
        """Both ranks, the one of the other pod first."""
        one, zero = self.engine(1, incarnation), self.engine(0, incarnation)
        answers = await asyncio.gather(one.open(), zero.open())
        assert ["", ""] == [answer.refused for answer in answers]
        assert answers[0].incarnation == answers[1].incarnation != ""
        return zero, one

    async def ready(self) -> bool:
        statuses = [(await s.call("GET", "/ready"))[0] for s in (self.leader, self.other)]
        return [200, 200] == statuses

    async def die(self) -> None:
        for engine in self.engines:
            await engine.die()
