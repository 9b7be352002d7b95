"""SGLang's frames, byte for byte, and the two frames that we put behind them."""

from __future__ import annotations

import pytest

from pdcluster_protocol.authentication import FrameSigner, FrameVerifier, KeyRing
from pdcluster_protocol.errors import Unauthorized, WireError
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import (
    Abort,
    AbortAck,
    Accepted,
    AuxData,
    Bootstrap,
    RegisterKVArgs,
    Run,
    RunsLanded,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.push import frames, trailers
from pdcluster_protocol.push.fields import lists, pack_lists, pack_numbers
from pdcluster_protocol.sidecar_messages import InstanceDied, Ping

RING = KeyRing({"k1": b"k" * 32})
DECODE = RankAddress("127.64.0.2", 9000)
KEY = Key(77, 123456789)
PLAIN = Key(77, 0)


def sealed(message: frames.Message) -> list[bytes]:
    return frames.seal(message, signer=FrameSigner(RING, "a"), receiver="b", incarnation="i-1")


def test_lists_have_the_documented_bytes() -> None:
    assert bytes.fromhex("02000000080000000000000001000000 02000000") == pack_lists(
        "i", ((1, 2), ())
    )
    assert b"" == pack_lists("i", ())
    assert bytes.fromhex("0100000000000000") == pack_lists("i", ((),))
    assert ((1, 2), ()) == lists("i", pack_lists("i", ((1, 2), ())), "x")


def test_page_numbers_and_the_aux_length_have_the_documented_bytes() -> None:
    aux = frames.encode(AuxData(PLAIN, 3, 5, b"x" * 64))

    assert bytes.fromhex("050000000600000009000000") == pack_numbers("i", (5, 6, 9))
    assert [b"AUX_DATA", b"77", b"3", b"5", bytes.fromhex("00000040"), b"x" * 64] == aux


def test_metadata_has_ten_frames() -> None:
    message = TransferMetadata(
        PLAIN, DECODE, "127.64.0.2:15001", pack_numbers("i", (5, 6, 9)), 4, 2, 128, ((1, 2), ())
    )

    assert [
        b"77",
        b"127.64.0.2",
        b"9000",
        b"127.64.0.2:15001",
        bytes.fromhex("050000000600000009000000"),
        b"4",
        pack_lists("i", ((1, 2), ())),
        b"2",
        b"128",
        b"",
    ] == frames.encode(message)
    assert message == frames.decode(frames.encode(message))


def test_dummy_metadata_has_empty_pages_and_no_aux_index() -> None:
    message = TransferMetadata(PLAIN, DECODE, "s:1", b"", None, dummy=True)

    assert [b"", b""] == frames.encode(message)[4:6]
    assert message == frames.decode(frames.encode(message))


def test_registration_has_twenty_frames() -> None:
    message = RegisterKVArgs(
        DECODE, "s:1", (1, 1 << 63), (3,), (640, 128), ((9,),), ((64,),), (0, 1), ((1,),), 1, 2
    )
    content = frames.encode(message)

    assert 20 == len(content)
    assert [b"None", b"127.64.0.2", b"9000", b"s:1"] == content[:4]
    assert [b"1", b"2", b"640"] == content[7:10]
    assert [b"1", b"0", b"", pack_numbers("Q", (640, 128))] == content[16:]
    assert message == frames.decode(content)


def test_a_registration_of_ten_frames_has_one_length_for_all() -> None:
    content = frames.encode(RegisterKVArgs(DECODE, "s:1", (1, 2), (3,), (640, 640)))[:10]

    assert RegisterKVArgs(DECODE, "s:1", (1, 2), (3,), (640, 640)) == frames.decode(content)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (Bootstrap(PLAIN, DECODE), [b"BOOTSTRAP", b"77", b"127.64.0.2", b"9000"]),
        (Abort(PLAIN, DECODE, 3), [b"ABORT", b"77", b"127.64.0.2", b"9000", b"3"]),
        (Abort(PLAIN, DECODE), [b"ABORT", b"77", b"127.64.0.2", b"9000"]),
        (AbortAck(PLAIN, 7, 3), [b"ABORT_ACK", b"77", b"7", b"3"]),
        (Status(PLAIN, 4, 7), [b"77", b"4", b"7"]),
    ],
)
def test_short_messages_have_exactly_these_frames(
    message: frames.Message, content: list[bytes]
) -> None:
    assert content == frames.encode(message)
    assert message == frames.decode(content)


def test_an_abort_without_return_address_still_names_its_room() -> None:
    assert Abort(PLAIN, RankAddress("", 0)) == frames.decode([b"ABORT", b"77"])
    assert Abort(PLAIN, RankAddress("", 0)) == frames.decode([b"ABORT", b"77", b"h"])


def test_an_unparsable_generation_counts_as_absent() -> None:
    assert Abort(PLAIN, DECODE) == frames.decode([b"ABORT", b"77", b"127.64.0.2", b"9000", b"x"])


@pytest.mark.parametrize(
    "message",
    [
        RegisterKVArgs(DECODE, "s:1", (1,), (2,), (3,), layout_digest="ab", page_count=9),
        TransferMetadata(KEY, DECODE, "s:1", b"\0" * 8, 1, prompt_tokens=9, prompt_digest="d"),
        Bootstrap(KEY, DECODE),
        Abort(KEY, DECODE, 1),
        AbortAck(KEY, 0, 1, drained=False),
        Accepted(KEY, 2),
        RunsLanded(KEY, 1, 5, (Run(0, 1, 2, 3, 4, 5),)),
        Status(KEY, 4, 1, runs=8, prompt_tokens=9, prompt_digest="d"),
        Status(KEY, 4, 1, runs=2, landed=(Run(1, 0, 5, 1, 24, 1 << 63, 8, 8),), epoch=5),
        Status(KEY, 0, 1, drained=False, reason="Stalled", detail="no byte for 30 s"),
        AuxData(KEY, 1, 2, b"row"),
        Ping("i-1", (1, 2)),
        InstanceDied("i-1", "the link closed"),
    ],
)
def test_our_fields_and_the_attempt_ride_in_the_trailer(message: frames.Message) -> None:
    raw = sealed(message)
    content, trailer, mac = trailers.split(raw)

    assert trailer is not None
    assert message == frames.decode(content, trailer)
    assert "a" == FrameVerifier(RING, "b").verify(raw[:-1], mac, trailer.stamp)
    assert "i-1" == trailer.incarnation


def test_a_status_with_more_runs_than_it_may_carry_is_refused() -> None:
    most = Limits().runs_per_status_max
    runs = tuple(Run(index, 0, index, 1, 24, 1 << 63, 8, 8) for index in range(most + 1))
    fits = Status(KEY, 4, 1, runs=most, landed=runs[:-1], epoch=1 << 62)
    content, trailer, _ = trailers.split(sealed(fits))
    assert fits == frames.decode(content, trailer)

    content, trailer, _ = trailers.split(sealed(Status(KEY, 4, 1, landed=runs)))
    with pytest.raises(WireError, match=f"{most + 1} runs; at most {most}"):
        frames.decode(content, trailer)


def test_a_plain_receiver_sees_the_frames_that_it_knows_first() -> None:
    raw = sealed(Status(KEY, 4, 7, 3))

    assert [b"77", b"4", b"7"] == raw[:3]
    assert 5 == len(raw)


def test_every_changed_byte_is_noticed() -> None:
    raw = sealed(Abort(KEY, DECODE, 1))
    trailer = trailers.split(raw).trailer
    assert trailer is not None

    for index in range(len(raw)):
        changed = list(raw)
        changed[index] = bytes([changed[index][0] ^ 1]) + changed[index][1:]
        with pytest.raises(Unauthorized, match="MAC"):
            FrameVerifier(RING, "b").verify(changed[:-1], changed[-1], trailer.stamp)


def test_an_unknown_version_is_refused_by_number() -> None:
    raw = sealed(Accepted(KEY, 2))
    # The version is the element behind the tag.
    head = 1 + 1 + len("PD_TRAILER")
    raw[-2] = raw[-2][:head] + b"\x63" + raw[-2][head + 1 :]

    with pytest.raises(WireError, match="version 99"):
        trailers.split(raw)


def test_a_trailer_of_another_room_is_refused() -> None:
    trailer = trailers.split(sealed(Accepted(KEY, 2))).trailer

    with pytest.raises(WireError, match="not the key"):
        frames.decode([b"78", b"4", b"7"], trailer)


@pytest.mark.parametrize(
    "content",
    [
        [],
        [b""],
        [b"77"],
        [b"77", b"4"],
        [b"0", b"4", b"1"],
        [b"-1", b"4", b"1"],
        [b"%d" % (1 << 63), b"4", b"1"],
        [b" 77", b"4", b"1"],
        [b"7_7", b"4", b"1"],
        [b"77", b"5", b"1"],
        [b"ABORT"],
        [b"ABORT", b"x"],
        [b"ABORT_ACK", b"77"],
        [b"BOOTSTRAP", b"77", b"h", b"0"],
        [b"BOOTSTRAP", b"77", b"a b", b"1"],
        [b"AUX_DATA", b"77", b"1", b"2", b"\0\0\0\5", b"row"],
        [b"None"] * 10,
        [b"77", b"h", b"1", b"s", b"abc", b"1", b"", b"1", b"0", b""],
        [b"77", b"h", b"1", b"s", b"", b"1", b"", b"1", b"0", b"\1\0\0\0"],
        [b"77", b"h", b"1", b"s", b"", b"1", b"\xff\xff\xff\xff", b"1", b"0", b""],
        [b"PD_ACCEPTED", b"\x80"],
        [b"PD_RUNS", frames.encode(Accepted(KEY, 2))[1]],
        [b"PD_ACCEPTED", frames.encode(Accepted(Key(0, 1), 2))[1]],
        [b"PD_PING", frames.encode(Accepted(KEY, 2))[1]],
        [b"\x80\x04]\x94.", b"x", b"y"],
    ],
)
def test_malformed_content_is_a_wire_error(content: list[bytes]) -> None:
    with pytest.raises(WireError):
        frames.decode(content)


def test_a_message_that_sglang_frames_exist_for_is_not_taken_as_a_body() -> None:
    from pdcluster_protocol import codec

    body = codec.node_messages.encode(Status(KEY, 4, 1))

    with pytest.raises(WireError, match="sent in frames"):
        frames.decode([b"PD_STATUS", body])


def test_too_many_and_too_large_frames_are_refused() -> None:
    with pytest.raises(WireError, match="65 frames"):
        trailers.split([b"x"] * 65)
    with pytest.raises(WireError, match="at most"):
        trailers.split([b"x" * (8 << 20), b"y"])


def test_inconsistent_metadata_does_not_leave() -> None:
    with pytest.raises(WireError, match="dummy"):
        frames.encode(TransferMetadata(KEY, DECODE, "s", b"", None))


def test_a_value_that_fits_no_frame_does_not_leave() -> None:
    with pytest.raises(WireError, match="does not fit"):
        frames.encode(RegisterKVArgs(DECODE, "s:1", (1 << 64,), (), (1,)))


def test_long_details_are_cut() -> None:
    content, trailer, _ = trailers.split(sealed(Status(KEY, 0, 1, detail="x" * 9999)))
    message = frames.decode(content, trailer)

    assert isinstance(message, Status)
    assert 512 == len(message.detail)
