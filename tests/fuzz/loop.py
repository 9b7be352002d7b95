"""Many bent inputs, fast: `python -m fuzz.loop --inputs 1000000` from the folder `tests`.

The inputs are spread over all targets by their weights and drawn from one seed, which is printed.
The loop ends at the first input that breaks a property, prints it, and says how to draw it again.
Processor time per input and the growth of memory over the run are bounded too.
"""

from __future__ import annotations

import argparse
import gc
import secrets
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random

from fuzz.catalogue import TARGETS
from fuzz.mutation import Parts
from fuzz.target import Target

INPUT_SECONDS_MAX = 2.0
"""Of this process's own processor time, for one input of at most a few hundred KB."""
WARM_INPUTS = 2000
"""So many inputs fill caches and free lists before growth is measured."""
GROWTH_BYTES_MAX = 48 << 20
SHOWN_BYTES_MAX = 2000


class Tally:
    """What came of one target's inputs."""

    def __init__(self) -> None:
        self.inputs = 0
        self.taken = 0
        self.seconds = 0.0
        self.slowest_seconds = 0.0


class Broken(Exception):
    """An input that broke a property."""

    def __init__(self, target: Target, index: int, parts: Parts, problem: str) -> None:
        super().__init__(problem)
        self.target = target
        self.index = index
        self.parts = parts


def play(target: Target, *, seed: int, index: int, tally: Tally) -> None:
    """Draw input `index` of a target and check it.

    Raises:
        Broken: it raised what it must not, or took too long.
    """
    parts = target.draw(Random(f"{seed}/{target.name}/{index}"))
    begun = time.process_time()
    try:
        tally.taken += target.check(parts)
    except Exception as error:
        raise Broken(target, index, parts, "".join(traceback.format_exception(error))) from error
    spent = time.process_time() - begun
    tally.inputs += 1
    tally.seconds += spent
    tally.slowest_seconds = max(tally.slowest_seconds, spent)
    if spent > INPUT_SECONDS_MAX:
        raise Broken(target, index, parts, f"it took {spent:.1f} s of processor time")


def resident_bytes() -> int:
    """The memory that this process occupies now."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


def run(targets: Sequence[Target], *, inputs: int, seed: int, first: int = 0) -> dict[str, Tally]:
    """Play about `inputs` inputs, each target its share.

    Raises:
        Broken: by the first input that breaks a property.
        MemoryError: the process grew although no target keeps anything.
    """
    weights = sum(target.weight for target in targets)
    tallies = {target.name: Tally() for target in targets}
    rounds = -(-inputs // weights)
    settled = 0
    for index in range(first, first + rounds):
        for target in targets:
            for turn in range(target.weight):
                number = index * target.weight + turn
                play(target, seed=seed, index=number, tally=tallies[target.name])
        if (index - first + 1) * weights >= WARM_INPUTS and not settled:
            settled = resident_bytes()
    growth = resident_bytes() - settled if settled else 0
    if growth > GROWTH_BYTES_MAX:
        raise MemoryError(f"{growth} bytes more than after the first {WARM_INPUTS} inputs")
    sys.stdout.write(f"memory: {growth / (1 << 20):+.1f} MiB since input {WARM_INPUTS}\n")
    return tallies


def show(tallies: dict[str, Tally]) -> None:
    """One line a target."""
    for name, tally in tallies.items():
        per_second = tally.inputs / tally.seconds if tally.seconds else 0.0
        sys.stdout.write(
            f"{name:20} {tally.inputs:8} inputs, {100 * tally.taken / max(1, tally.inputs):5.1f} %"
            f" taken, {per_second:8.0f} /s, slowest {1000 * tally.slowest_seconds:7.1f} ms\n"
        )


def main(arguments: Sequence[str]) -> int:
    """Parse, play, tell."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="in all, over all targets")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--first", type=int, default=0, help="the round to begin with")
    parser.add_argument("--target", action="append", choices=names, help="only this one; repeat")
    chosen = parser.parse_args(arguments)
    targets = [
        target for target in TARGETS if chosen.target is None or target.name in chosen.target
    ]
    sys.stdout.write(f"seed {chosen.seed}, {chosen.inputs} inputs, {len(targets)} targets\n")
    begun = time.monotonic()
    try:
        tallies = run(targets, inputs=chosen.inputs, seed=chosen.seed, first=chosen.first)
    except Broken as broken:
        shown = repr(broken.parts)
        sys.stdout.write(f"{broken}\ninput: {shown[:SHOWN_BYTES_MAX]} ({len(shown)} characters)\n")
        sys.stdout.write(
            f"again: make fuzz FUZZ_ARGS=\"--seed {chosen.seed} --target '{broken.target.name}'"
            f' --first {broken.index // broken.target.weight} --inputs 1"\n'
        )
        return 1
    show(tallies)
    sys.stdout.write(f"{time.monotonic() - begun:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
