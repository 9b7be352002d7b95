"""A real engine process without model and fabric: `null_engine.py CONFIG BOOTSTRAP_HOST:PORT`.

Node, owner loop, executor, legs, inbox and the link to a real sidecar are the engine's own. The
HTTP side is replaced by lines, so that the driver can stand where the router would:

In: `ROOM PAUSE_NANOSECONDS ATTEMPT`. Out: first `ready`, then for each room `ROOM BEGUN COMPUTED
ENDED` of monotonic nanoseconds: pages there and computation begun, rows computed (decode: 0), leg
concluded.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

from bench.null_parts import NullCompute, NullModel, Times, open_instantly
from pdcluster_engine import assembly
from pdcluster_engine.model.builtin import byte_codec
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.submission import Output, Submission
from pdcluster_engine.telemetry import Telemetry, configure_logging
from pdcluster_protocol.config import EngineConfig, decode_config
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress

PROMPT = tuple(range(64))
READY_SECONDS = 30.0


class Line:
    """One leg's sink: its end is a line of output."""

    def __init__(self, room: int, times: Times) -> None:
        self._room = room
        self._times = times

    def emit(self, output: Output) -> None:
        """There are no tokens."""

    def finished(self) -> None:
        now = time.monotonic_ns()
        times = self._times
        os.write(1, b"%d %d %d %d\n" % (self._room, times.begun, times.computed, now))

    def failed(self, reason: Reason, detail: str) -> None:
        sys.stderr.write(f"room {self._room} failed: {reason} {detail}\n")
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    config = decode_config(Path(sys.argv[1]).read_bytes(), EngineConfig, source=sys.argv[1])
    host, port = sys.argv[2].rsplit(":", 1)
    configure_logging(instance=config.instance, role=str(config.role), dp_rank=config.dp_rank)
    # The two parts that are not control plane.
    assembly.ModelThread = NullCompute
    assembly.open_transport = open_instantly
    made = assembly.assemble(config, NullModel(byte_codec()), telemetry=Telemetry())
    gc.freeze()
    for body in (made.loop.run, made.compute.run):
        threading.Thread(target=body, daemon=True).start()
    made.loop.open_link()
    deadline = time.monotonic() + READY_SECONDS
    while not made.engine.state().ready and time.monotonic() < deadline:
        time.sleep(0.01)
    os.write(1, b"ready\n")
    serve(made, RankAddress(host, int(port)))


def serve(made: assembly.Assembly, bootstrap: RankAddress) -> None:
    unread = b""
    while chunk := os.read(0, 1 << 16):
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            room, pause_ns, attempt = map(int, line.split())
            made.compute.pauses[room] = pause_ns
            times = made.compute.times[room] = Times()
            made.engine.submit(
                Submission(
                    key=Key(room, attempt),
                    rid=f"rid-{room}",
                    token_ids=PROMPT,
                    sampling=SamplingParameters(),
                    output_tokens_max=8,
                    bootstrap=bootstrap,
                ),
                Line(room, times),
            )


if __name__ == "__main__":
    main()
    os._exit(0)
