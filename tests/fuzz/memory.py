"""What peers write into our memory and announce, and the requests to the transfer process."""

from __future__ import annotations

import math
import socket
from typing import Any

import msgspec

from fuzz.mutation import Parts
from fuzz.target import Target
from pdcluster_engine.memory.metadata import (
    TOP_LOGPROBS_MAX,
    MetadataRow,
    MetadataTable,
    metadata_bytes,
    row_fault,
)
from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.transport.channel import Channel, ChannelClosed
from pdcluster_engine.transport.port import (
    OPERATIONS_MAX,
    PIECES_MAX,
    DigestRequest,
    Request,
    WriteRequest,
)
from pdcluster_engine.transport.requests import Outstanding, refusal
from pdcluster_protocol.errors import TransportError
from pdcluster_protocol.ids import ROOM_MAX
from pdcluster_protocol.messages import Run
from pdcluster_protocol.push.runs import coverage_fault, run_fault
from support.ledgers import LAYOUT

ROOM = 77
VOCABULARY = 300
ROW = MetadataRow(
    token=7,
    cached_tokens=3,
    logprob=-0.5,
    top_logprobs=((7, -0.5), (9, -1.5), (0, -7.0)),
    room=ROOM,
)


def _table(raw: bytes) -> MetadataTable:
    return MetadataTable(HostWindow(memoryview(bytearray(raw))), 0, 1)


def _row_bytes(row: MetadataRow) -> bytes:
    memory = bytearray(metadata_bytes(1))
    MetadataTable(HostWindow(memoryview(memory)), 0, 1).write(0, row)
    return bytes(memory)


def check_rows(parts: Parts) -> bool:
    """Any bytes are a row; one without a fault has a token and alternatives of the vocabulary."""
    size = metadata_bytes(1)
    raw = b"".join(parts)[:size].ljust(size, b"\0")
    taken = False
    for asked in (None, 0, 3, TOP_LOGPROBS_MAX):
        table = _table(raw)
        row = table.read(0, top_logprobs=asked)
        if row_fault(row, room=ROOM, vocab_size=VOCABULARY):
            continue
        taken = True
        assert ROOM == row.room <= ROOM_MAX
        assert all(0 <= token < VOCABULARY for token, _ in (*row.top_logprobs, (row.token, 0)))
        assert len(row.top_logprobs) <= (TOP_LOGPROBS_MAX if asked is None else asked)
        table.write(0, row)
        again = table.read(0, top_logprobs=asked)
        assert _comparable(row) == _comparable(again)
    return taken


def _comparable(row: MetadataRow) -> Any:
    """NaN equals nothing, not even what was written for it."""

    def shown(value: float | None) -> float | str | None:
        return "nan" if value is not None and math.isnan(value) else value

    alternatives = [(token, shown(value)) for token, value in row.top_logprobs]
    return row.token, row.cached_tokens, shown(row.logprob), alternatives, row.room


PAGES = (5, 6, 7, 2)
PROMPT_TOKENS = 14
METADATA_ROWS = (16, 8)
SLOT = 3


def _runs() -> list[Run]:
    runs: list[Run] = []
    for region, described in enumerate(LAYOUT.regions):
        full = 3 * LAYOUT.page_size * described.bytes_per_token
        last = (PROMPT_TOKENS - 3 * LAYOUT.page_size) * described.bytes_per_token
        runs.append(Run(len(runs), region, 5, 3, full, 1))
        runs.append(Run(len(runs), region, 2, 1, last, 1))
    for buffer, nbytes in enumerate(METADATA_ROWS):
        runs.append(Run(len(runs), len(LAYOUT.regions) + buffer, SLOT, 1, nbytes, 1))
    return runs


RUNS = _runs()
RUN_LIST: msgspec.msgpack.Decoder[list[Run]] = msgspec.msgpack.Decoder(list[Run])


def check_runs(parts: Parts) -> bool:
    """Announced runs are of this request or have a fault; complete ones cover every byte once."""
    taken = False
    for part in parts:
        try:
            runs = RUN_LIST.decode(part)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        positions = {page: position for position, page in enumerate(PAGES)}
        fitting = [
            run
            for run in runs
            if not run_fault(
                run,
                layout=LAYOUT,
                page_positions=positions,
                metadata_rows=METADATA_ROWS,
                slot=SLOT,
            )
        ]
        if coverage_fault(
            fitting,
            layout=LAYOUT,
            pages=PAGES,
            prompt_tokens=PROMPT_TOKENS,
            metadata_rows=METADATA_ROWS,
        ):
            continue
        taken = True
        covered = sum(run.nbytes for run in fitting)
        assert PROMPT_TOKENS * LAYOUT.bytes_per_token + sum(METADATA_ROWS) == covered
    return taken


ARENA_NBYTES = 1 << 20
REQUESTS: tuple[Request, ...] = (
    WriteRequest(1, "127.64.0.2:15001", 4096, 1 << 40, 8192, digest=True),
    WriteRequest(2, "127.64.0.2:15001", 0, 1 << 41, 64, True, 16, 128, 256),
    DigestRequest(3, 0, 1 << 20),
    DigestRequest(4, 64, 32, 100, 64),
)


def check_transfers(parts: Parts) -> bool:
    """Frames of the transfer channel are requests or end it; each request is possible or named."""
    ours, theirs = socket.socketpair()
    channel: Channel[Request] = Channel(ours, Request)
    outstanding = Outstanding(ARENA_NBYTES, operations_max=OPERATIONS_MAX)
    taken = False
    try:
        for part in parts:
            theirs.sendall(len(part).to_bytes(4, "little") + part)
            for request in channel.receive():
                taken = _submitted(outstanding, request) or taken
    except ChannelClosed:
        return False
    finally:
        channel.close()
        theirs.close()
    assert len(outstanding) <= OPERATIONS_MAX
    return taken


def _submitted(outstanding: Outstanding, request: Request) -> bool:
    if refusal(request) is not None:
        return False
    try:
        outstanding.add(request)
    except TransportError:
        return False
    assert 0 <= request.source.offset
    assert request.source.end <= ARENA_NBYTES
    assert 1 <= request.source.count <= PIECES_MAX
    if isinstance(request, WriteRequest):
        assert 0 < request.destination.offset < request.destination.end <= 1 << 64
    assert msgspec.msgpack.encode(request)
    return True


TARGETS = (
    Target("metadata rows", ((_row_bytes(ROW),),), check_rows),
    Target(
        "runs",
        ((msgspec.msgpack.encode(RUNS),), (msgspec.msgpack.encode(RUNS[::-1]),)),
        check_runs,
    ),
    Target(
        "transfers",
        tuple((msgspec.msgpack.encode([request]),) for request in REQUESTS),
        check_transfers,
    ),
)
