"""Inputs that once were more than taken or refused, each with the target that it broke."""

from __future__ import annotations

import msgspec
import pytest

from fuzz.catalogue import TARGETS
from fuzz.connections import WHOLE
from fuzz.files import BOMBS, OBJECTS
from fuzz.http import ROW
from fuzz.link import HELLO
from fuzz.machines import Said, encoded, registrations
from fuzz.memory import REQUESTS
from fuzz.mutation import Parts
from fuzz.wire import PLAIN, SEALED
from pdcluster_engine.memory.metadata import MetadataRow, MetadataTable, metadata_bytes, row_fault
from pdcluster_engine.memory.window import HostWindow
from pdcluster_protocol.codec import engine_to_sidecar
from pdcluster_protocol.topology import RankCoordinate

CHECKS = {target.name: target.check for target in TARGETS}
DEEP = 5000


def _nested_trailer() -> Parts:
    """A trailer with one more field than we know, nested past every recursion limit."""
    trailer = msgspec.msgpack.decode(SEALED[0][-2])
    raw = msgspec.msgpack.encode([*trailer, None])
    return [*SEALED[0][:-2], raw[:-1] + b"\x91" * DEEP + b"\xc0", SEALED[0][-1]]


def _nested(body: bytes) -> bytes:
    return body[:-1] + b', "more": ' + b"[" * DEEP + b"]" * DEEP + b"}"


def _nested_transfer() -> Parts:
    fields = [*msgspec.to_builtins(REQUESTS[2]), None]
    return [msgspec.msgpack.encode([fields])[:-1] + b"\x91" * DEEP + b"\xc0"]


def _impossible_hello() -> Parts:
    fields = msgspec.msgpack.decode(engine_to_sidecar.encode(HELLO))
    fields["parallel"] = {"tp": 3, "dp": 2}
    return [msgspec.msgpack.encode(fields)]


def test_a_rank_that_cannot_be_is_refused_in_an_answer_that_can_be_sent() -> None:
    place = RankCoordinate(1, 0, 0, (1 << 64) - 1)
    hello = msgspec.structs.replace(HELLO, coordinate=place)

    assert CHECKS["link from engine"]([engine_to_sidecar.encode(hello)])


def _registration(**changes: int) -> Parts:
    changed = msgspec.structs.replace(registrations()[0], **changes)
    return list(encoded(Said(0, "decode", changed)))


FOUND: list[tuple[str, Parts]] = [
    ("frames", _nested_trailer()),
    ("frames", [PLAIN[6][0], b"\x91" * DEEP]),
    ("frames", [*PLAIN[2][:6], b"\1\0\0\0\4\0\0\0\7\0\0\0", *PLAIN[2][7:]]),
    ("seals", _nested_trailer()),
    ("link from engine", _impossible_hello()),
    ("registry", [_nested(msgspec.json.encode(ROW))]),
    ("registry", [b"{}", _nested(b'{"a": 1}')]),
    ("registry", [b"{}", b"{}", _nested(b'{"a": 1}')]),
    ("control", [_nested(b'{"rid": 1}')]),
    ("control", [b'{"parallel": {"tp": 0}}']),
    ("prefill node", _registration(decode_pp_size=-1)),
    ("prefill node", _registration(decode_tp_size=1 << 62, decode_pp_size=1 << 62)),
    ("prefill node", _registration(decode_tp_rank=-1)),
    ("transfers", _nested_transfer()),
    *(("objects", list(bomb)) for bomb in BOMBS),
    ("objects", [OBJECTS[0] + b"  " + b"x" * 9000 + b": 1\n"]),
    ("objects", [b"a: 1\n" * 2 + b"x" * 9000 + b": 1\n"]),
    ("objects", [b"y" * 9000 + b": 1\n" + b"y" * 9000 + b": 2\n"]),
]


def test_a_dummy_whose_lists_are_empty_has_no_state() -> None:
    assert CHECKS["frames"]([*PLAIN[2][:6], b"\1\0\0\0\0\0\0\0", *PLAIN[2][7:]])


def test_a_null_among_the_fields_of_generate_is_forwarded_as_none() -> None:
    assert CHECKS["requests"]([b'{"text": "abc", "sampling_params": null, "rid": "q"}'])


@pytest.mark.parametrize("behind", [WHOLE, WHOLE[:20], b"HTTP/1.1 200 OK\r\n"])
def test_what_comes_behind_an_engines_answer_is_nobodys_and_ends_the_connection(
    behind: bytes,
) -> None:
    assert CHECKS["leg connections"]([WHOLE])
    assert not CHECKS["leg connections"]([WHOLE + behind])


@pytest.mark.parametrize(("name", "parts"), FOUND)
def test_what_was_found_once_is_refused(name: str, parts: Parts) -> None:
    assert not CHECKS[name](parts)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (MetadataRow(token=300, room=7), "token 300"),
        (MetadataRow(token=1, top_logprobs=((300, 0.0),), room=7), "token 300"),
        (MetadataRow(token=1, room=8), "of room 8, not of 7"),
        (MetadataRow(token=299, top_logprobs=((0, float("nan")),), room=7), ""),
    ],
)
def test_a_row_with_an_alternative_outside_the_vocabulary_begins_no_answer(
    row: MetadataRow, fault: str
) -> None:
    table = MetadataTable(HostWindow(memoryview(bytearray(metadata_bytes(1)))), 0, 1)
    table.write(0, row)

    found = row_fault(table.read(0), room=7, vocab_size=300)
    assert fault in found
    assert bool(fault) is bool(found)
