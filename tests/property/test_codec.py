"""Every message comes back; every other byte string is a WireError; streams may be cut anywhere."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_protocol.codec import (
    Codec,
    FrameReader,
    engine_to_sidecar,
    frame,
    node_messages,
    sidecar_messages,
    sidecar_to_engine,
)
from pdcluster_protocol.errors import WireError
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import Inbound, NodeMessage, Outbound, Run
from pdcluster_protocol.sidecar_messages import InstanceDied, Ping

CODECS: list[Codec[Any]] = [engine_to_sidecar, sidecar_to_engine, node_messages, sidecar_messages]

numbers = st.integers(-(1 << 63), (1 << 64) - 1)
keys = st.builds(Key, numbers, numbers)
addresses = st.builds(RankAddress, st.text(max_size=9), numbers)
number_lists = st.lists(numbers, max_size=4).map(tuple)
runs = st.builds(Run, numbers, numbers, numbers, numbers, numbers, numbers)
given_types = {
    Key: keys,
    RankAddress: addresses,
    Run: runs,
    int: numbers,
    str: st.text(max_size=9),
    bytes: st.binary(max_size=9),
    bool: st.booleans(),
    int | None: st.none() | numbers,
    RankAddress | None: st.none() | addresses,
    tuple[int, ...]: number_lists,
    tuple[tuple[int, ...], ...]: st.lists(number_lists, max_size=2).map(tuple),
    tuple[Run, ...]: st.lists(runs, max_size=3).map(tuple),
}


def built(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """A strategy for all fields of a message, optional ones included."""
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{field.name: given_types[field.type] for field in fields})


NODE_MESSAGES: tuple[type[msgspec.Struct], ...] = get_args(NodeMessage)
node_values = st.sampled_from(NODE_MESSAGES).flatmap(built)


@given(node_values)
def test_every_node_message_comes_back_equal(message: Any) -> None:
    assert message == node_messages.decode(node_messages.encode(message))


@given(node_values, addresses, st.text(max_size=9))
def test_every_node_message_crosses_the_link_in_both_directions(
    message: Any, to: RankAddress, incarnation: str
) -> None:
    out, into = Outbound(to, message), Inbound(message, incarnation)

    assert out == engine_to_sidecar.decode(engine_to_sidecar.encode(out))
    assert into == sidecar_to_engine.decode(sidecar_to_engine.encode(into))


@given(built(Ping) | built(InstanceDied))
def test_every_sidecar_message_comes_back_equal(message: Any) -> None:
    assert message == sidecar_messages.decode(sidecar_messages.encode(message))


def decode_or_refuse(codec: Codec[Any], raw: bytes) -> None:
    try:
        codec.decode(raw)
    except WireError:
        return


@given(st.sampled_from(CODECS), st.binary(max_size=64))
def test_any_bytes_are_a_message_or_a_wire_error(codec: Codec[Any], raw: bytes) -> None:
    decode_or_refuse(codec, raw)


@settings(max_examples=300)
@given(node_values, st.data())
def test_any_damage_to_a_message_is_a_message_or_a_wire_error(
    message: Any, data: st.DataObject
) -> None:
    raw = bytearray(node_messages.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    decode_or_refuse(node_messages, bytes(raw))
    decode_or_refuse(node_messages, bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_come_out_whole_and_in_order_wherever_the_stream_is_cut(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = FrameReader(bytes_max=40)
    out: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        out += reader.feed(stream[start:end])

    assert payloads == out


@given(st.integers(41, (1 << 32) - 1), st.binary(max_size=40))
def test_a_frame_that_announces_too_much_is_refused_at_its_head(size: int, before: bytes) -> None:
    reader = FrameReader(bytes_max=40)

    with pytest.raises(WireError, match=f"frame of {size} bytes"):
        reader.feed(frame(before) + size.to_bytes(4, "little"))
