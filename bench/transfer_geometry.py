"""The transport at the geometry of GLM-5.3, beside bare Mooncake over the same memory.

Three ways in turn, round after round: bare Mooncake, our transport without checksums, and with all
of them. The CPU time bears a busy machine best; rates are compared within a round only.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time
from collections.abc import Iterator, Sequence

import msgspec

from bench import bare_transport
from bench.figures import Report, median
from bench.kv_geometry import Move, glm_layout, head_slices, runs
from bench.phases import process_cpu_seconds
from bench.raw_mooncake import RawEnd, raw_end
from pdcluster_protocol.ids import Key
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import Run, RunsLanded
from pdcluster_protocol.push import frames

PAGES = 1024
PAGES_QUICK = 64
ROUNDS = 24
SLICES = 8
"""A round moves one such part of the arena: a busy machine disturbs short turns more evenly."""
RUN_KIB = (256, 1024, 4096)
WINDOW = 16
WINDOW_SMALL = 64
"""Small writes of bare Mooncake in flight: more, and fewer, were slower."""
STRIDED = "256 B x 4,096"
WAYS = ("raw", "Off", "Full")
FLOOR = {"Off": 0.9, "Full": 0.8}
HOSTS = ("127.64.254.3", "127.64.254.4")
PORTS_MIN = (17100, 17140)
FILL_BYTES = 1 << 20
GB = 1e9


class Pass(msgspec.Struct, frozen=True):
    """All bytes moved once, one way."""

    gb: float
    seconds: float
    engine_cpu: float
    """Of this process, which stands for the owner threads of both engines."""
    source_cpu: float
    destination_cpu: float

    @property
    def rate(self) -> float:
        """GB a second."""
        return self.gb / self.seconds

    @property
    def cpu(self) -> tuple[float, float, float, float]:
        """CPU seconds a GB: all, engines, the process that sends, the one that receives."""
        parts = (self.engine_cpu, self.source_cpu, self.destination_cpu)
        return (sum(parts) / self.gb, *(part / self.gb for part in parts))


class Field(msgspec.Struct, frozen=True):
    """Both pairs of ends over the same two arenas."""

    ours: tuple[bare_transport.End, bare_transport.End]
    raw: tuple[RawEnd, RawEnd]

    def run(self, way: str, moves: Sequence[Move], *, raw_window: int) -> Pass:
        """One pass."""
        here, there = self.raw if way == "raw" else self.ours
        nbytes = sum(move.nbytes * move.pieces for move in moves)
        before = (_own_cpu(), process_cpu_seconds(here.pid), process_cpu_seconds(there.pid))
        if way == "raw":
            seconds = self.raw[0].move(self.raw[1], moves, raw_window)
        else:
            seconds = bare_transport.move(*self.ours, moves, digests=way == "Full")
        after = (_own_cpu(), process_cpu_seconds(here.pid), process_cpu_seconds(there.pid))
        engine, source, destination = (b - a for a, b in zip(before, after, strict=True))
        # While the bare processes work this one only waits.
        own = 0.0 if way == "raw" else engine
        return Pass(nbytes / GB, seconds, own, source, destination)


Passes = dict[tuple[str, str], list[Pass]]
"""By size of the runs and way, one a round."""


def run(report: Report) -> None:
    """Every way with every size, in turn."""
    rounds = report.times(ROUNDS)
    pages = PAGES if rounds == ROUNDS else PAGES_QUICK
    layout = glm_layout()
    nbytes = layout.arena_bytes(pages)
    sizes = {f"{kib} KiB": runs(layout, pages=pages, run_bytes_max=kib << 10) for kib in RUN_KIB}
    strided = head_slices(operations=4, pieces=4096, nbytes=256, ratio=4)
    passes: Passes = {(size, way): [] for size in (*sizes, STRIDED) for way in WAYS}
    with field(nbytes) as measured:
        for way in WAYS:
            measured.run(way, next(reversed(sizes.values())), raw_window=WINDOW)
        for number in range(rounds):
            for size, moves in sizes.items():
                part = _slice(moves, number % SLICES)
                for way in WAYS:
                    passes[size, way].append(measured.run(way, part, raw_window=WINDOW))
            for way in WAYS:
                passes[STRIDED, way].append(measured.run(way, strided, raw_window=WINDOW_SMALL))
    report.title(
        f"transfer: GLM-5.3, {layout.bytes_per_token:,} bytes a token in {len(layout.regions)} "
        f"regions, {pages:,} pages, {nbytes / GB:.2f} GB, {rounds} rounds of an eighth"
    )
    _report_runs(report, passes, list(sizes))
    _report_pieces(report, passes, pieces=sum(move.pieces for move in strided))
    _report_messages(report, sizes[f"{RUN_KIB[-1]} KiB"], nbytes)


@contextlib.contextmanager
def field(nbytes: int) -> Iterator[Field]:
    """Two arenas, the first one full of noise, with four processes over them."""
    with contextlib.ExitStack() as stack:
        arenas = [stack.enter_context(bare_transport.memory(nbytes)) for _ in HOSTS]
        noise = random.Random(1).randbytes(FILL_BYTES)
        for start in range(0, nbytes, FILL_BYTES):
            os.pwrite(arenas[0], noise[: nbytes - start], start)
        ours = [
            stack.enter_context(bare_transport.end(number, arena, nbytes))
            for number, arena in enumerate(arenas)
        ]
        raw = [
            stack.enter_context(raw_end(host, port, arena, nbytes))
            for host, port, arena in zip(HOSTS, PORTS_MIN, arenas, strict=True)
        ]
        yield Field((ours[0], ours[1]), (raw[0], raw[1]))


def _slice(moves: Sequence[Move], part: int) -> Sequence[Move]:
    return moves[len(moves) * part // SLICES : len(moves) * (part + 1) // SLICES]


def _report_runs(report: Report, passes: Passes, sizes: Sequence[str]) -> None:
    best = [max(passes[size, "raw"][i].rate for size in sizes) for i in range(_rounds(passes))]
    best_cpu = min(_median_cpu(passes[size, "raw"])[0] for size in sizes)
    report.table(
        ("runs of, checksum", "GB/s", "of raw", "of best raw", "CPU s/GB", *PARTS, "of best raw"),
        [
            (
                f"{size}, {way}",
                f"{median([one.rate for one in passes[size, way]]):.2f}",
                f"{_ratio(passes, size, way):.2f}",
                f"{_over(passes[size, way], best):.2f}",
                *(f"{part:.3f}" for part in _median_cpu(passes[size, way])),
                f"{_median_cpu(passes[size, way])[0] / best_cpu:.2f}",
            )
            for size in sizes
            for way in WAYS
        ],
    )
    for way, floor in FLOOR.items():
        for size in sizes:
            what = f"checksum {way}, runs of {size}, of bare Mooncake's rate"
            report.floor(what, _ratio(passes, size, way), floor=floor, unit="times")
        what = f"checksum {way}, runs of {sizes[-1]}, of bare Mooncake's best rate of all sizes"
        report.floor(what, _over(passes[sizes[-1], way], best), floor=floor, unit="times")


PARTS = ("engines", "sender", "receiver")


def _report_pieces(report: Report, passes: Passes, *, pieces: int) -> None:
    report.line()
    report.table(
        (f"pieces of {STRIDED}", "1,000/s", "of raw", "CPU us each", *PARTS),
        [
            (
                way,
                f"{median([pieces / one.seconds for one in passes[STRIDED, way]]) / 1000:.1f}",
                f"{_ratio(passes, STRIDED, way):.2f}",
                *(f"{part * 256 / GB * 1e6:.1f}" for part in _median_cpu(passes[STRIDED, way])),
            )
            for way in WAYS
        ],
    )


def _report_messages(report: Report, moves: Sequence[Move], nbytes: int) -> None:
    """What announcing the runs costs, a full message at a time: encoded and decoded."""
    limit = Limits().runs_per_message_max
    landed = [Run(i, 0, i, 1, move.nbytes, (1 << 64) - 1 - i) for i, move in enumerate(moves)]
    started = time.thread_time()
    messages = [
        frames.encode(RunsLanded(Key(1, 1), 0, 1, tuple(landed[start : start + limit])))
        for start in range(0, len(landed), limit)
    ]
    for message in messages:
        frames.decode(message)
    seconds = time.thread_time() - started
    size = sum(len(frame) for message in messages for frame in message)
    gb = nbytes / GB
    report.line(
        f"  announced: {len(landed) / gb:.0f} runs, {size / gb / 1000:.1f} kB in PD_RUNS a GB, "
        f"{seconds / gb * 1e6:.0f} us of CPU a GB to encode and decode"
    )


def _ratio(passes: Passes, size: str, way: str) -> float:
    return _over(passes[size, way], [one.rate for one in passes[size, "raw"]])


def _over(ours: Sequence[Pass], rates: Sequence[float]) -> float:
    return median([one.rate / rate for one, rate in zip(ours, rates, strict=True)])


def _median_cpu(passes: Sequence[Pass]) -> tuple[float, ...]:
    return tuple(median(column) for column in zip(*(one.cpu for one in passes), strict=True))


def _rounds(passes: Passes) -> int:
    return len(next(iter(passes.values())))


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
