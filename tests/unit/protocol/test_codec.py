"""Bytes to messages and back, and what is no message."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_protocol.codec import (
    Codec,
    FrameReader,
    frame,
    node_messages,
    sidecar_messages,
)
from pdcluster_protocol.errors import WireError
from pdcluster_protocol.ids import Key
from pdcluster_protocol.messages import Abort, Accepted, NodeMessage, Run, RunsLanded
from pdcluster_protocol.sidecar_messages import Ping
from support.ledgers import PEER, key

RUNS = RunsLanded(key(), 0, 3, (Run(0, 1, 2, 3, 4, (1 << 64) - 1), Run(1, 0, 7, 1, 9, 0)))


@pytest.mark.parametrize("message", [Abort(key(), PEER, 3), Abort(key(), PEER), RUNS], ids=str)
def test_a_message_comes_back_equal(message: NodeMessage) -> None:
    assert message == node_messages.decode(node_messages.encode(message))
    assert message == node_messages.decode(memoryview(node_messages.encode(message)))


def encoded(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\xff" * 40,
        node_messages.encode(RUNS)[:-1],
        node_messages.encode(RUNS) + b"\x00",
        encoded(type="PD_NOBODY"),
        encoded(type="PD_ACCEPTED", rank=0),
        encoded(type="PD_ACCEPTED", key=[1], rank=0),
        encoded(type="PD_ACCEPTED", key=["1", 2], rank=0),
        encoded(type="PD_ACCEPTED", key=[1, 2], rank=None),
        encoded(type="PD_ACCEPTED", key=[1, 2], rank=1.5),
        sidecar_messages.encode(Ping("i", (1,))),
        b"\x82\xa4type\xa3\xff\xfe\xfd\xa3key\x01",
    ],
    ids=range(14),
)
def test_what_is_no_message_is_a_wire_error(raw: bytes) -> None:
    with pytest.raises(WireError, match="undecodable message"):
        node_messages.decode(raw)


def test_values_nested_without_end_are_a_wire_error_also_in_an_unknown_field() -> None:
    deep = b"\x91" * 500_000 + b"\xc0"
    head = msgspec.msgpack.encode("type") + msgspec.msgpack.encode("PD_ACCEPTED")

    for raw in (deep, b"\x82" + head + msgspec.msgpack.encode("unknown") + deep):
        with pytest.raises(WireError, match="undecodable message"):
            node_messages.decode(raw)


def test_fields_of_a_later_version_are_ignored() -> None:
    raw = encoded(type="PD_ACCEPTED", key=[1, 2], rank=0, from_the_future={"a": [1]})

    assert Accepted(Key(1, 2), 0) == node_messages.decode(raw)


def test_a_message_over_the_bound_is_refused_before_it_is_read() -> None:
    small: Codec[NodeMessage] = Codec(NodeMessage, bytes_max=8)

    with pytest.raises(WireError, match="message of 9 bytes; at most 8 are taken"):
        small.decode(b"\xc1" * 9)


def test_frames_are_cut_wherever_the_stream_is_cut() -> None:
    payloads = [b"", b"a", b"bc" * 300]
    stream = b"".join(frame(payload) for payload in payloads)
    whole, single = FrameReader(), FrameReader()

    assert payloads == whole.feed(stream)
    assert payloads == [f for i in range(len(stream)) for f in single.feed(stream[i : i + 1])]
    assert [] == whole.feed(b"")


def test_a_frame_over_the_bound_is_refused_by_its_length_alone() -> None:
    reader = FrameReader(bytes_max=4)
    assert [b"1234"] == reader.feed(frame(b"1234"))

    with pytest.raises(WireError, match="frame of 5 bytes; at most 4 are taken"):
        reader.feed((5).to_bytes(4, "little"))
