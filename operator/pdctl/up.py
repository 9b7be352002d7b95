"""`pdctl up`: plan, check, start, prove, show; and end everything again.

The command in the foreground only watches: all processes belong to the supervisor, which ends them
when this process ends, in whatever way.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from pdcluster_operator.api.v1alpha1 import PDCluster
from pdcluster_operator.plan import make_plan
from pdcluster_protocol.errors import ConfigError, PDClusterError, Reason
from pdctl.asking import FIRST_PROMPT, answer_alone, curl, first_answer, printable, send_canaries
from pdctl.control import runs
from pdctl.counters import Counters, read_counters
from pdctl.model_config import require_weights
from pdctl.preflight import installed_mooncake, require_mooncake
from pdctl.prepare import Prepared, prepare
from pdctl.proc import cpu_seconds, descendants
from pdctl.processes import RunSpec
from pdctl.run_folder import base_folder, remove_base
from pdctl.starting import wait_until_ready
from pdctl.supervision import Supervision
from pdctl.table import process_table

COUNTERS_SECONDS = 1.0


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP: end everything. An order, not an error."""


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `pdctl up`."""

    source_folder: Path
    port: int
    admin_port: int
    detach: bool


def up(cluster: PDCluster, options: UpOptions) -> int:
    """Run a cluster until interrupted, or until ready with `detach`; the exit code.

    Raises:
        ConfigError: what the spec, the flags or the machine lack.
        PDClusterError: what did not start, or did not answer.
    """
    started = time.monotonic()
    plan = make_plan(cluster)
    if plan.suspended:
        raise ConfigError(
            "spec.prefill.replicas and spec.decode.replicas are 0 (suspended): nothing to run"
        )
    require_weights(cluster.spec.model.source, options.source_folder)
    require_mooncake(installed_mooncake())
    _require_new_name(plan.cluster)
    base = base_folder()
    with interruptible():
        try:
            prepared = prepare(
                plan,
                base,
                source_folder=options.source_folder,
                port=options.port,
                admin_port=options.admin_port,
            )
            with Supervision(prepared) as supervision:
                _start(cluster, prepared, supervision, started)
                if options.detach:
                    supervision.detach()
                    print(f"{plan.cluster} runs detached; end it with: pdctl down")
                    return 0
                _watch(prepared.spec, supervision)
        except Interrupted:
            print(f"\n{plan.cluster} ended")
        finally:
            remove_base(base)
    return 0


def _require_new_name(name: str) -> None:
    """`ps`, `down` and `generate` find a run by its name."""
    for run in runs():
        if run.spec.cluster == name:
            raise ConfigError(
                f"cluster {name!r} runs already at {run.spec.endpoint}; end it with pdctl down"
                f" --name {name}, or choose another metadata.name"
            )


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the signals that end a program raise `Interrupted` once; later ones are ignored."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    cluster: PDCluster, prepared: Prepared, supervision: Supervision, started: float
) -> None:
    spec = prepared.spec
    print(
        f"starting {spec.cluster}: {len(prepared.plan.pods)} pods, fingerprint"
        f" {prepared.plan.fingerprint}, files in {spec.folder}"
    )
    state = wait_until_ready(
        spec,
        supervision,
        deadline_seconds=cluster.spec.timeouts.startup_seconds,
        tell=lambda line: print(line, flush=True),
    )
    cpu = sum(cpu_seconds(pid) for pid in descendants(supervision.pid))
    print(f"ready in {time.monotonic() - started:.1f} s (CPU {cpu:.1f} s)\n")
    print(process_table(spec, state), end="\n\n")
    for prefill, decode, seconds in send_canaries(spec, prepared.plan):
        print(f"canary    {prefill} -> {decode}: ok in {seconds * 1000:.0f} ms")
    text, usage, seconds = first_answer(spec)
    print(f"prompt    {FIRST_PROMPT}")
    print(
        f"answer    {printable(text)!r} ({usage.prompt_tokens} + {usage.completion_tokens} tokens,"
        f" {seconds:.2f} s)"
    )
    same = "the same" if answer_alone(spec) == text else "ANOTHER text (batch shapes differ)"
    print(f"checked   one process alone answers {same}")
    print(f"endpoint  {spec.endpoint}\ntry       {curl(spec)}\n", flush=True)


def _watch(spec: RunSpec, supervision: Supervision) -> None:
    """Show counters on a terminal until the supervisor ends, which it should not by itself."""
    shown = sys.stdout.isatty()
    if shown:
        print("Ctrl-C ends everything")
    earlier, at = Counters(), time.monotonic()
    while not supervision.wait(COUNTERS_SECONDS if shown else None):
        now = time.monotonic()
        counters = read_counters(spec)
        sys.stdout.write(f"\r\x1b[K{counters.line(earlier, now - at)}")
        sys.stdout.flush()
        earlier, at = counters, now
    if supervision.exit_code == 0:
        print(f"\n{spec.cluster} was ended by pdctl down")
        return
    raise PDClusterError(
        f"the supervisor ended with {supervision.exit_code}", reason=Reason.PEER_DIED
    )
