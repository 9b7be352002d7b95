"""Whatever leaves arrives unchanged; whatever else arrives is a `WireError` and nothing worse."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.authentication import FrameSigner, KeyRing
from pdcluster_protocol.errors import WireError
from pdcluster_protocol.ids import ATTEMPT_MAX, ROOM_MAX, Key, RankAddress
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import (
    Abort,
    AbortAck,
    AuxData,
    RegisterKVArgs,
    Run,
    RunsLanded,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.push import frames, trailers

RING = KeyRing({"k1": b"k" * 32})

u31 = st.integers(0, (1 << 31) - 1)
u32 = st.integers(0, (1 << 32) - 1)
u63 = st.integers(0, (1 << 63) - 1)
u64 = st.integers(0, (1 << 64) - 1)
keys = st.builds(Key, st.integers(1, ROOM_MAX), st.integers(0, ATTEMPT_MAX))
addresses = st.builds(RankAddress, st.just("127.64.0.2"), st.integers(1, 65535))
texts = st.text(max_size=512)
sessions = st.just("127.64.0.2:15001")


def tuples(of: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(of, max_size=6).map(tuple)


def nested(of: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    return st.lists(tuples(of), max_size=3).map(tuple)


@st.composite
def registrations(draw: st.DrawFn) -> RegisterKVArgs:
    pairs = draw(st.lists(st.tuples(u64, u63), max_size=6))
    return RegisterKVArgs(
        draw(addresses),
        "s:1",
        tuple(pair[0] for pair in pairs),
        draw(tuples(u64)),
        tuple(pair[1] for pair in pairs),
        draw(nested(u64)),
        draw(nested(u32)),
        draw(tuples(u32)),
        draw(nested(u32)),
        layout_digest=draw(texts),
        page_count=draw(u63),
        mapping=draw(u63),
    )


@st.composite
def metadata(draw: st.DrawFn) -> TransferMetadata:
    pages = draw(st.binary(max_size=8)) * 4
    aux = draw(st.none() | u63)
    dummy = not pages and aux is None
    return TransferMetadata(
        draw(keys),
        draw(addresses),
        "s:1",
        pages,
        aux,
        draw(st.integers(1, 64)),
        draw(u63),
        () if dummy else draw(nested(u31)),
        dummy=dummy,
        prompt_tokens=draw(u63),
        prompt_digest=draw(texts),
        epoch=draw(u63),
        mapping=draw(u63),
    )


def runs(*, max_size: int) -> st.SearchStrategy[tuple[Run, ...]]:
    return st.lists(st.builds(Run, u63, u63, u63, u63, u63, u64), max_size=max_size).map(tuple)


messages = st.one_of(
    registrations(),
    metadata(),
    st.builds(Abort, keys, addresses, st.none() | u63),
    st.builds(AbortAck, keys, u63, st.none() | u63, st.booleans()),
    st.builds(
        Status,
        keys,
        st.integers(0, 4),
        u63,
        runs=u63,
        landed=runs(max_size=Limits().runs_per_status_max),
        epoch=u63,
        drained=st.booleans(),
        prompt_tokens=u63,
        prompt_digest=texts,
        reason=texts,
        detail=texts,
    ),
    st.builds(AuxData, keys, u63, u63, st.binary(max_size=64)),
    st.builds(
        RunsLanded,
        keys,
        u63,
        u63,
        runs(max_size=4),
    ),
)


@given(messages)
def test_a_sealed_message_arrives_unchanged(message: frames.Message) -> None:
    raw = frames.seal(message, signer=FrameSigner(RING, "a"), receiver="b", incarnation="i")
    content, trailer, _ = trailers.split(raw)

    assert message == frames.decode(content, trailer)


words = st.sampled_from(
    [b"None", b"ABORT", b"ABORT_ACK", b"BOOTSTRAP", b"AUX_DATA", b"PD_RUNS", b"PD_PING", b"1", b""]
)
junk = st.lists(words | st.binary(max_size=40), max_size=24)


@given(junk)
def test_random_frames_are_a_message_or_a_wire_error(raw: list[bytes]) -> None:
    try:
        content, trailer, _ = trailers.split(raw)
        frames.decode(content, trailer)
    except WireError:
        pass


@given(messages, st.data())
def test_damaged_frames_are_a_message_or_a_wire_error(
    message: frames.Message, data: st.DataObject
) -> None:
    raw = frames.seal(message, signer=FrameSigner(RING, "a"), receiver="b", incarnation="i")
    index = data.draw(st.integers(0, len(raw) - 1))
    frame = bytearray(raw[index] or b"\0")
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    raw[index] = bytes(frame)[: data.draw(st.integers(0, len(frame)))]
    try:
        content, trailer, _ = trailers.split(raw)
        frames.decode(content, trailer)
    except WireError:
        pass
