"""One timer for all sequences: each is woken once, at its time, and not after it was cleared."""

from __future__ import annotations

import asyncio

from pdcluster_sidecar.router.alarms import Alarms

SOON_SECONDS = 0.02


class Sleeper:
    """Writes its name into a list when it is woken."""

    def __init__(self, name: str, woken: list[str], rang: asyncio.Event) -> None:
        self.name = name
        self.woken = woken
        self.rang = rang

    def wake(self) -> None:
        self.woken.append(self.name)
        self.rang.set()


async def test_the_earliest_rings_first_however_the_alarms_were_set() -> None:
    alarms: Alarms[Sleeper] = Alarms()
    woken: list[str] = []
    rang = asyncio.Event()
    now = asyncio.get_running_loop().time()
    for name, after in (("late", 3.0), ("soon", 1.0), ("cleared", 0.5), ("then", 2.0)):
        sleeper = Sleeper(name, woken, rang)
        alarms.set(sleeper, now + after * SOON_SECONDS)
        if name == "cleared":
            alarms.clear(sleeper)

    while len(woken) < 3:
        rang.clear()
        await asyncio.wait_for(rang.wait(), 5.0)
    assert ["soon", "then", "late"] == woken


async def test_an_alarm_may_be_set_again_while_it_rings() -> None:
    alarms: Alarms[Again] = Alarms()
    again = Again(alarms)
    alarms.set(again, asyncio.get_running_loop().time())

    await asyncio.wait_for(again.twice.wait(), 5.0)


class Again:
    """Wants to be woken a second time."""

    def __init__(self, alarms: Alarms[Again]) -> None:
        self.alarms = alarms
        self.count = 0
        self.twice = asyncio.Event()

    def wake(self) -> None:
        self.count += 1
        if self.count == 2:
            self.twice.set()
        else:
            self.alarms.set(self, asyncio.get_running_loop().time() + SOON_SECONDS)
