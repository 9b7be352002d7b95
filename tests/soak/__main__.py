"""Kill every process of a cluster in turn, and let clients leave, in the numbers of a release.

    python -m soak [--rounds 20] [--clients 32] [--departures 200] [--spec FILE] [--only NAME ...]

Ends with 0 when nothing was violated. `docs/howto/soak.md` says what is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pdctl.table import aligned
from soak.deaths import kill_again_and_again
from soak.departures import leave_again_and_again
from soak.processes import mortals
from soak.questions import Bank
from soak.tally import Tally, details, table
from support.cluster import PairCluster

CLIENTS_LEAVE = "clients"
ANSWER_SECONDS = 150.0
"""A request without an end by then hangs, also on a machine that others use too."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog="make soak", description="Kill, leave, and count.")
    parser.add_argument("--rounds", type=int, default=20, help="of each victim (20)")
    parser.add_argument("--clients", type=int, default=32, help="requests that run at once (32)")
    parser.add_argument("--departures", type=int, default=200, help="rounds of leaving (200)")
    parser.add_argument("--spec", type=Path, help="a PDCluster (YAML); absent: the tests' own pair")
    parser.add_argument("--model", default="", help="a builtin model in place of the file's own")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help=f"victims whose names contain one of these; {CLIENTS_LEAVE!r} are those that leave",
    )  # fmt: skip
    parser.add_argument("--logs", type=Path, help="where all logs go if something was violated")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args(argv)
    for name in ("rounds", "clients", "departures"):
        if getattr(options, name) < (name == "clients"):
            parser.error(f"--{name} is {getattr(options, name)}; it must be positive")
    return options


def cluster_of(options: argparse.Namespace) -> PairCluster:
    """The cluster that the arguments name.

    Every token can be compared: the tests' pair runs in mode exact, in small chunks, so that
    prefill takes its time.
    """
    if options.spec is None:
        return PairCluster(model=options.model or "tiny-llama", mode="exact", chunk=32)
    if options.model:
        return PairCluster(model=options.model, mode="exact", chunk=32, spec=options.spec)
    return PairCluster(model="", mode="", spec=options.spec)


async def run(cluster: PairCluster, options: argparse.Namespace) -> list[Tally]:
    """All rounds of all causes, each told when it is through."""
    bank = Bank(cluster, clients=options.clients, deadline_seconds=ANSWER_SECONDS)
    await bank.prepare()
    tallies = []
    chosen = [p for p in mortals(cluster) if _wanted(p.name, options.only)]
    for victim in chosen if options.rounds else []:
        dice = random.Random(f"{options.seed}/{victim.name}")
        tally = await kill_again_and_again(cluster, bank, victim, rounds=options.rounds, dice=dice)
        _tell(tally)
        tallies.append(tally)
    if options.departures and _wanted(CLIENTS_LEAVE, options.only):
        dice = random.Random(f"{options.seed}/{CLIENTS_LEAVE}")
        tally = await leave_again_and_again(cluster, bank, rounds=options.departures, dice=dice)
        _tell(tally)
        tallies.append(tally)
    return tallies


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(part in name for part in only)


def _tell(tally: Tally) -> None:
    sys.stdout.write("\n".join([aligned(table([tally])), *details(tally)]) + "\n\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; the exit code."""
    options = parse(argv)
    sys.stdout.write(f"seed {options.seed}: make soak SOAK_ARGS='--seed {options.seed} ...'\n")
    sys.stdout.flush()
    # So that the cluster ends with us in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with cluster_of(options) as cluster:
        tallies = asyncio.run(run(cluster, options))
        violations = sum(len(tally.violations) for tally in tallies)
        if violations and options.logs is not None:
            options.logs.write_text(cluster.logs())
    sys.stdout.write(aligned(table(tallies)) + f"\n{violations} violations\n")
    return 1 if violations or not tallies else 0


if __name__ == "__main__":
    sys.exit(main())
