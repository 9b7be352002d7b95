"""What a process holds, and whether it holds more and more.

Descriptors cover files, sockets, pipes and memory files. Memory is the anonymous part of the
resident set: the arena is a memory file of fixed size, whose pages come in as they are used.

Pools and caches grow and shrink, a leak only grows. So all processes are looked at after each
round, when nothing runs, and compared is the most of an early third with the least of the last
third. A process that was replaced meanwhile keeps its name and is compared too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from soak.processes import Process, processes
from support.cluster import PairCluster

WARM_ROUNDS = 3
"""Not compared: what is made once is made in them."""
LOOKS_MIN = 6
"""With fewer rounds after those nothing can be said of growth."""
DESCRIPTORS_MORE_MAX = 4
"""A router keeps as many connections to engines as were ever needed at once, and the dice may ask
for some more late. Of a leak of one a round twelve compared rounds show more than this."""
THREADS_MORE_MAX = 2
BYTES_MORE_MAX = 16 << 20
"""Over some twelve of twenty rounds with 40 requests each: 35 kB a request."""
_PROC = Path("/proc")


class Footprint(msgspec.Struct, frozen=True):
    """What one process holds now."""

    descriptors: Mapping[str, int]
    """By kind: `socket`, `pipe`, `anon_inode`, `memfd`, `file`."""
    threads: int
    anonymous_bytes: int

    @property
    def descriptor_count(self) -> int:
        return sum(self.descriptors.values())


def footprints(cluster: PairCluster) -> dict[str, Footprint]:
    """All processes that there are now, by name."""
    taken = {process.name: footprint(process.pid) for process in _living(cluster)}
    return {name: print_ for name, print_ in taken.items() if print_ is not None}


def footprint(pid: int) -> Footprint | None:
    """One process; None when it is gone."""
    folder = _PROC / str(pid)
    try:
        fields = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        targets = [_kind(link) for link in (folder / "fd").iterdir()]
    except OSError:
        return None
    return Footprint(
        Counter(target for target in targets if target),
        int(fields["Threads"]),
        int(fields.get("RssAnon", "0 kB").split()[0]) * 1024,
    )


class History:
    """All processes after each round."""

    def __init__(self) -> None:
        self._looks: list[dict[str, Footprint]] = []

    def look(self, cluster: PairCluster) -> None:
        """Take down what every process holds now."""
        self._looks.append(footprints(cluster))

    def add(self, look: dict[str, Footprint]) -> None:
        """The same for a look that was taken elsewhere."""
        self._looks.append(look)

    def leaks(self) -> list[str]:
        """What grew beyond its bound, and processes that came; one sentence each."""
        if not self._looks:
            return []
        first, last = self._looks[0], self._looks[-1]
        found = [f"{name} runs, and did not before" for name in last.keys() - first.keys()]
        looks = self._looks[WARM_ROUNDS:]
        if len(looks) < LOOKS_MIN:
            return found
        third = len(looks) // 3
        for name in sorted(first.keys() & last.keys()):
            early, late = (
                [look[name] for look in part if name in look]
                for part in (looks[:third], looks[-third:])
            )
            if early and late:
                found += _growth(name, early, late)
        return found


def _growth(name: str, early: Sequence[Footprint], late: Sequence[Footprint]) -> list[str]:
    found = []
    for what, most, of in (
        ("descriptors", DESCRIPTORS_MORE_MAX, lambda print_: print_.descriptor_count),
        ("threads", THREADS_MORE_MAX, lambda print_: print_.threads),
        ("bytes", BYTES_MORE_MAX, lambda print_: print_.anonymous_bytes),
    ):
        before, after = max(map(of, early)), min(map(of, late))
        if after > before + most:
            held = f" ({dict(late[-1].descriptors)})" if what == "descriptors" else ""
            found.append(f"{name} grew from {before:,} to {after:,} {what}{held}")
    return found


def files(cluster: PairCluster) -> set[str]:
    """What lies in the run folder."""
    folder = Path(cluster.run.folder)
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _living(cluster: PairCluster) -> list[Process]:
    return [process for process in processes(cluster) if process.pid]


def _kind(link: Path) -> str:
    try:
        target = str(link.readlink())
    except OSError:
        return ""
    if target.startswith("/memfd:"):
        return "memfd"
    return "file" if target.startswith("/") else target.partition(":")[0]
