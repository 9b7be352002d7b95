"""Signatures: what is right passes, what was changed, replayed or malformed is refused by name."""

from __future__ import annotations

import pytest

from pdcluster_protocol.authentication import (
    HTTP_WINDOW,
    FrameSigner,
    FrameVerifier,
    HttpSigner,
    HttpVerifier,
    KeyRing,
    Stamp,
    own_authorities,
)
from pdcluster_protocol.errors import ConfigError, Unauthorized

OLD = KeyRing({"2026-01": b"o" * 32})
BOTH = KeyRing({"2026-01": b"o" * 32, "2026-02": b"n" * 32})
HERE = "127.64.0.1:8998"


def test_an_empty_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is none"):
        KeyRing({})


def test_a_short_key_is_refused_by_its_id() -> None:
    with pytest.raises(ConfigError, match="k1 has 15 bytes"):
        KeyRing({"k1": b"x" * 15})


def test_a_key_id_that_would_break_the_header_is_refused() -> None:
    with pytest.raises(ConfigError, match="no key id"):
        KeyRing({"a;b": b"x" * 32})


def test_the_greatest_key_id_signs() -> None:
    assert "2026-02" == BOTH.current


def test_a_ring_does_not_show_its_keys() -> None:
    assert "nnn" not in repr(BOTH)


def test_a_signed_request_names_its_session() -> None:
    header = HttpSigner(OLD, "s-1").sign("POST", "/pd/v1/hello?a=1", b"{}", authority=HERE)

    assert "s-1" == HttpVerifier(BOTH).verify(
        header, "POST", "/pd/v1/hello?a=1", b"{}", authorities=[HERE]
    )


def test_both_keys_are_valid_during_a_rotation() -> None:
    verifier = HttpVerifier(BOTH)

    for number, ring in enumerate((OLD, BOTH)):
        header = HttpSigner(ring, f"s-{number}").sign("GET", "/", b"", authority=HERE)
        assert f"s-{number}" == verifier.verify(header, "GET", "/", b"", authorities=[HERE])


def test_an_unknown_key_id_is_named() -> None:
    header = HttpSigner(BOTH, "s").sign("GET", "/", b"", authority=HERE)

    with pytest.raises(Unauthorized, match="2026-02"):
        HttpVerifier(OLD).verify(header, "GET", "/", b"", authorities=[HERE])


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [("GET", "/a", b"x"), ("POST", "/a?b", b"x"), ("POST", "/a", b"y"), ("POST", "/", b"ax")],
)
def test_a_changed_request_is_refused(method: str, target: str, body: bytes) -> None:
    header = HttpSigner(OLD, "s").sign("POST", "/a", b"x", authority=HERE)

    with pytest.raises(Unauthorized, match="MAC is wrong"):
        HttpVerifier(OLD).verify(header, method, target, body, authorities=[HERE])


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (None, "missing"),
        ("", "missing"),
        ("nonsense", "version 'nonsense'"),
        ("x" * 5000, "version;key-id"),
        ("1;k;s;1;" + "0" * 64, "version '1' is unknown; send 2"),
        ("2;k;s;-1;h:1;" + "0" * 64, "counter '-1'"),
        ("2;k;s;0;h:1;" + "0" * 64, "counter 0"),
        ("2;k;s;9999999999999999999;h:1;" + "0" * 64, "out of range"),
        ("2;k;s;1;h:1;zz", "mac 'zz'"),
        ("2;k;;1;h:1;" + "0" * 64, "session ''"),
        ("2;k;s;1;;" + "0" * 64, "authority ''"),
        ("2;k;s;1;" + "0" * 64, "version;key-id"),
        ("2;k;s;1;h:1;" + "0" * 64 + ";more", "version;key-id"),
        ("2;2026-01;s;1;h:1;" + "0" * 64, "MAC is wrong"),
    ],
)
def test_a_bad_header_is_refused_by_what_is_wrong(header: str | None, what: str) -> None:
    with pytest.raises(Unauthorized, match=what):
        HttpVerifier(OLD).verify(header, "GET", "/", b"", authorities=[HERE])


def test_what_was_signed_for_another_server_is_refused_by_both_names() -> None:
    header = HttpSigner(OLD, "s").sign("GET", "/", b"", authority=HERE)
    elsewhere = HttpVerifier(OLD)

    with pytest.raises(Unauthorized, match=f"for {HERE}; this server is 127.64.0.2:8998 or h:1"):
        elsewhere.verify(header, "GET", "/", b"", authorities=["127.64.0.2:8998", "h:1"])
    # It has used up no counter: the server that it is for takes it.
    assert "s" == elsewhere.verify(header, "GET", "/", b"", authorities=[HERE])


def test_the_authority_inside_a_header_cannot_be_exchanged() -> None:
    header = HttpSigner(OLD, "s").sign("GET", "/", b"", authority=HERE)

    with pytest.raises(Unauthorized, match="MAC is wrong"):
        HttpVerifier(OLD).verify(header.replace(HERE, "h:1"), "GET", "/", b"", authorities=["h:1"])


@pytest.mark.parametrize(
    ("dialled", "sockname"),
    [
        ("127.0.0.1:41", ("127.0.0.1", 41)),
        ("127.0.0.1:41", ("::ffff:127.0.0.1", 41, 0, 0)),
        ("[::1]:41", ("::1", 41, 0, 0)),
        ("Pod-0:8998", None),
        ("pod-0:8998", ("10.0.0.7", 8998)),
    ],
)
def test_a_server_is_known_by_its_configured_name_and_by_its_end_of_the_connection(
    dialled: str, sockname: object
) -> None:
    header = HttpSigner(OLD, "s").sign("GET", "/", b"", authority=dialled)
    names = own_authorities("pod-0", 8998, sockname)

    assert "s" == HttpVerifier(OLD).verify(header, "GET", "/", b"", authorities=names)


def test_a_replay_is_refused() -> None:
    header = HttpSigner(OLD, "s").sign("GET", "/", b"", authority=HERE)
    verifier = HttpVerifier(OLD)
    verifier.verify(header, "GET", "/", b"", authorities=[HERE])

    with pytest.raises(Unauthorized, match="used before"):
        verifier.verify(header, "GET", "/", b"", authorities=[HERE])


def test_requests_may_overtake_each_other_inside_the_window() -> None:
    signer = HttpSigner(OLD, "s")
    headers = [signer.sign("GET", "/", b"", authority=HERE) for _ in range(8)]
    verifier = HttpVerifier(OLD, window=8)

    for header in reversed(headers):
        assert "s" == verifier.verify(header, "GET", "/", b"", authorities=[HERE])


def test_what_lies_behind_the_window_is_refused() -> None:
    signer = HttpSigner(OLD, "s")
    headers = [signer.sign("GET", "/", b"", authority=HERE) for _ in range(9)]
    verifier = HttpVerifier(OLD, window=8)
    verifier.verify(headers[-1], "GET", "/", b"", authorities=[HERE])

    with pytest.raises(Unauthorized, match="too old"):
        verifier.verify(headers[0], "GET", "/", b"", authorities=[HERE])


def test_a_request_may_be_overtaken_by_all_that_a_busy_sender_signs_in_seconds() -> None:
    signer = HttpSigner(OLD, "s")
    headers = [signer.sign("GET", "/", b"", authority=HERE) for _ in range(HTTP_WINDOW)]
    verifier = HttpVerifier(OLD)

    for header in (headers[-1], headers[0]):
        assert "s" == verifier.verify(header, "GET", "/", b"", authorities=[HERE])


def test_sessions_are_bounded_and_only_right_macs_take_a_place() -> None:
    verifier = HttpVerifier(OLD, sessions_max=2)
    for number in range(5):
        header = HttpSigner(OLD, f"s-{number}").sign("GET", "/", b"", authority=HERE)
        verifier.verify(header, "GET", "/", b"", authorities=[HERE])
    with pytest.raises(Unauthorized):
        verifier.verify("2;2026-01;forged;1;h:1;" + "0" * 64, "GET", "/", b"", authorities=["h:1"])

    assert 2 == len(verifier._windows)


def test_an_answer_is_bound_to_its_request() -> None:
    request = HttpSigner(OLD, "client").sign("POST", "/pd/v1/hello", b"{}", authority=HERE)
    other = HttpSigner(OLD, "client-2").sign("POST", "/pd/v1/hello", b"{}", authority=HERE)
    answer = HttpSigner(OLD, "server").sign_answer(request, b"card")
    verifier = HttpVerifier(OLD)

    assert "server" == verifier.verify_answer(answer, request, b"card")
    with pytest.raises(Unauthorized, match="MAC is wrong"):
        verifier.verify_answer(answer, other, b"card")


def sealed(signer: FrameSigner, receiver: str, *frames: bytes) -> tuple[list[bytes], bytes, Stamp]:
    stamp = signer.stamp(receiver)
    return list(frames), signer.mac(frames, stamp), stamp


def test_signed_frames_name_their_sender() -> None:
    frames, mac, stamp = sealed(FrameSigner(OLD, "a"), "b", b"one", b"two")

    assert "a" == FrameVerifier(BOTH, "b").verify(frames, mac, stamp)


def test_moved_frame_borders_are_noticed() -> None:
    _, mac, stamp = sealed(FrameSigner(OLD, "a"), "b", b"one", b"two")

    with pytest.raises(Unauthorized, match="MAC of the frames"):
        FrameVerifier(OLD, "b").verify([b"onet", b"wo"], mac, stamp)


def test_frames_for_an_earlier_start_of_the_receiver_are_refused() -> None:
    frames, mac, stamp = sealed(FrameSigner(OLD, "a"), "b", b"one")

    with pytest.raises(Unauthorized, match="for session 'b'"):
        FrameVerifier(OLD, "b2").verify(frames, mac, stamp)


def test_replayed_frames_are_refused() -> None:
    frames, mac, stamp = sealed(FrameSigner(OLD, "a"), "b", b"one")
    verifier = FrameVerifier(OLD, "b")
    verifier.verify(frames, mac, stamp)

    with pytest.raises(Unauthorized, match="used before"):
        verifier.verify(frames, mac, stamp)


def test_counters_run_per_receiver_and_survive_being_forgotten() -> None:
    signer = FrameSigner(OLD, "a", receivers_max=1)

    assert [1, 2] == [signer.stamp("b").counter for _ in range(2)]
    assert 1 == signer.stamp("c").counter
    assert 3 == signer.stamp("b").counter


def test_a_mac_of_the_wrong_length_is_refused() -> None:
    frames, _, stamp = sealed(FrameSigner(OLD, "a"), "b", b"one")

    with pytest.raises(Unauthorized):
        FrameVerifier(OLD, "b").verify(frames, b"", stamp)
