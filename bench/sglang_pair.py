"""One side of SGLang's handshake by its own classes, without an engine: prefill or decode.

    sglang_pair.py prefill|decode REGISTRY_PORT MODEL_FOLDER

It runs in the environment of `tools/bench-peers`, from this folder. Manager, sender and receiver
are SGLang's, with their threads and ZMQ sockets; the transfer engine is replaced by one that is
done at once. The loop below stands for the scheduler's: it takes new rooms, polls every open one,
and pauses for a tenth of a millisecond when nothing moved, as SGLang's idle prefill loop does (its
decode loop does not pause at all). A busy scheduler polls once a forward; that is not shown here.

In: a line `ROOM PAUSE_NANOSECONDS ATTEMPT` for each request; SGLang knows no attempt. Out: first
`ready`, then for each room a line `ROOM FIRST SECOND ENDED` of monotonic nanoseconds. Prefill:
pages known, transfer begun, success seen. Decode: success seen, metadata sent, room cleared.
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import Any

import numpy as np
import sglang_imports  # noqa: F401  It must come before sglang.
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

POLL_SECONDS = 0.0001
"""`PREFILL_INPUT_POLL_INTERVAL_S` of SGLang 0.5.23."""
HOST = "127.0.0.1"
PAGES, SLOTS, AUX_BUFFERS = 256, 64, 10
PAGES_SENT = 1


class InstantEngine:
    """Every write has arrived as soon as it is asked for."""

    def batch_register(self, pointers: list[int], lengths: list[int]) -> int:
        return 0

    def batch_deregister(self, pointers: list[int]) -> int:
        return 0

    def get_session_id(self) -> str:
        return f"{HOST}:{os.getpid()}"

    def transfer_sync(self, session: str, source: int, target: int, length: int) -> int:
        return 0

    def batch_transfer_sync(
        self, session: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        return 0


def settings(role: str, registry_port: int, model: str) -> ServerArgs:
    return ServerArgs(
        model_path=model,
        host=HOST,
        device="cpu",
        dtype="float32",
        page_size=64,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disaggregation_mode=role,
        disaggregation_transfer_backend="mooncake_tcp",
        disaggregation_bootstrap_port=registry_port,
    )


def kv_args(memory: np.ndarray) -> KVArgs:
    """Four regions of pages and the ten metadata buffers of an engine, somewhere in `memory`."""
    args = KVArgs()
    item, row = 8192, 64
    base = memory.ctypes.data
    args.kv_data_ptrs = [base + index * PAGES * item for index in range(4)]
    args.kv_data_lens = [PAGES * item] * 4
    args.kv_item_lens = [item] * 4
    behind = base + 4 * PAGES * item
    args.aux_data_ptrs = [behind + index * SLOTS * row for index in range(AUX_BUFFERS)]
    args.aux_data_lens = [SLOTS * row] * AUX_BUFFERS
    args.aux_item_lens = [row] * AUX_BUFFERS
    args.engine_rank = args.gpu_id = args.pp_rank = args.system_dp_rank = 0
    args.prefill_start_layer = args.num_draft_entries = 0
    args.prefill_end_layer, args.page_size = 2, 64
    args.kv_head_num = args.total_kv_head_num = 2
    args.kv_cache_dtype_str, args.kv_layer_ids, args.is_hybrid_mla_backend = "auto", [], False
    args.kv_layout = args.swa_kv_cache_layout = args.ib_device = None
    args.rust_http_port = args.mla_compression_ratios = None
    for name in (
        "types", "data_ptrs", "data_lens", "item_lens", "layer_ids", "dim_per_tensor",
        "slice_outer_counts", "conv_shard_groups",
    ):  # fmt: skip
        setattr(args, f"state_{name}", [])
    return args


class Room:
    """One request on one side."""

    def __init__(self, number: int, pause_ns: int) -> None:
        self.number = number
        self.pause_ns = pause_ns
        self.first = 0
        self.second = 0
        self.connection: Any = None


class Scheduler:
    """The loop that polls; `open` and `move` are its two roles."""

    def __init__(self, role: str, registry_port: int, manager: conn.MooncakeKVManager) -> None:
        self.registry = f"{HOST}:{registry_port}"
        self.manager = manager
        self.rooms: list[Room] = []
        self.slot = 0
        self.prefill = role == "prefill"
        self.unread = b""

    def run(self) -> None:
        os.write(1, b"ready\n")
        while self.turn():
            pass

    def turn(self) -> bool:
        moved = False
        if select.select([0], [], [], 0)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return False
            *lines, self.unread = (self.unread + chunk).split(b"\n")
            for line in lines:
                number, pause_ns, _ = map(int, line.split())
                self.open(Room(number, pause_ns))
            moved = True
        ended = [room for room in self.rooms if self.move(room)]
        for room in ended:
            self.rooms.remove(room)
            room.connection.clear()
            now = time.monotonic_ns()
            os.write(1, b"%d %d %d %d\n" % (room.number, room.first, room.second, now))
        if not moved and not ended:
            time.sleep(POLL_SECONDS)
        return True

    def open(self, room: Room) -> None:
        self.rooms.append(room)
        self.slot = (self.slot + 1) % SLOTS
        if self.prefill:
            room.connection = conn.MooncakeKVSender(self.manager, self.registry, room.number)
            return
        assert self.manager.try_ensure_parallel_info(self.registry)
        room.connection = conn.MooncakeKVReceiver(self.manager, self.registry, room.number)
        room.connection.init(0)
        pages = np.arange(self.slot, self.slot + PAGES_SENT, dtype=np.int32)
        room.connection.send_metadata(pages, self.slot)
        room.second = time.monotonic_ns()

    def move(self, room: Room) -> bool:
        """Poll one room; whether it has ended."""
        state = room.connection.poll()
        if state == KVPoll.Failed:
            raise RuntimeError(f"room {room.number} failed")
        if self.prefill and not room.second and state == KVPoll.WaitingForInput:
            now = time.monotonic_ns()
            room.first = room.first or now
            if now >= room.first + room.pause_ns:
                room.second = now
                room.connection.init(PAGES_SENT, self.slot)
                room.connection.send(np.arange(self.slot, self.slot + PAGES_SENT, dtype=np.int32))
        if state != KVPoll.Success:
            return False
        if not self.prefill:
            room.first = time.monotonic_ns()
        return True


def main() -> None:
    role, registry_port, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    server_args = settings(role, registry_port, model)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    # There are no process groups without an engine.
    get_parallel()._stamp["pp_group"] = None  # noqa: SLF001  There is no public way.
    conn.get_mooncake_transfer_engine = InstantEngine
    memory = np.zeros(4 * PAGES * 8192 + AUX_BUFFERS * SLOTS * 64, dtype=np.uint8)
    mode = DisaggregationMode.PREFILL if role == "prefill" else DisaggregationMode.DECODE
    manager = conn.MooncakeKVManager(kv_args(memory), mode, server_args, False)  # noqa: FBT003  Theirs.
    Scheduler(role, registry_port, manager).run()


if __name__ == "__main__":
    try:
        main()
    finally:
        # The manager's threads never end by themselves.
        sys.stderr.flush()
        os._exit(0)
