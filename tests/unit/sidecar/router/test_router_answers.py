"""What legs bring, byte by byte: whole events only, and every end told once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.pair import LegAnswered, LegFailed, Witness
from pdcluster_sidecar.router.answers import EVENT_BYTES_MAX, LegAnswer, LegStream, read_error

KEY = Key(1, 2)
DONE = b"data: [DONE]\n\n"
EVENTS = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\n'
ERROR = b'data: {"error":{"message":"late","code":"TransferFailed"}}\n\n'


class Owner:
    """A sequence that writes down what it hears."""

    def __init__(self) -> None:
        self.relayed = b""
        self.pieces: list[bytes] = []
        self.ends: list[LegAnswered | LegFailed] = []
        self.answers: list[tuple[bytes, bytes]] = []
        self.progress = 0

    def leg_ended(self, event: LegAnswered | LegFailed) -> None:
        self.ends.append(event)

    def leg_progressed(self, key: Key) -> None:
        assert KEY == key
        self.progress += 1

    def relay(self, key: Key, events: bytes) -> None:
        assert KEY == key
        self.relayed += events
        self.pieces.append(events)

    def take_answer(self, key: Key, body: bytes, content_type: bytes) -> None:
        assert KEY == key
        self.answers.append((body, content_type))

    @property
    def failure(self) -> LegFailed:
        (end,) = self.ends
        assert isinstance(end, LegFailed)
        return end


def fed(*pieces: bytes, status: int = 200) -> tuple[Owner, LegStream]:
    owner = Owner()
    stream = LegStream(owner, KEY)
    stream.on_head(status, {b"content-type": b"text/event-stream"})
    for piece in pieces:
        stream.on_part(piece)
        stream.on_fed()
    return owner, stream


@given(st.lists(st.integers(0, len(EVENTS + DONE)), max_size=8))
def test_events_are_passed_on_whole_however_they_are_cut(cuts: list[int]) -> None:
    raw = EVENTS + DONE
    edges = [0, *sorted(cuts), len(raw)]
    owner, stream = fed(*(raw[a:b] for a, b in itertools.pairwise(edges)))
    stream.on_end()

    assert raw == owner.relayed
    assert all(piece.endswith(b"\n\n") for piece in owner.pieces)
    assert [LegAnswered(KEY, Role.DECODE)] == owner.ends


@given(st.lists(st.integers(0, len(EVENTS + ERROR)), max_size=8))
def test_an_error_event_is_a_failure_and_never_passed_on(cuts: list[int]) -> None:
    raw = EVENTS + ERROR
    edges = [0, *sorted(cuts), len(raw)]
    owner, stream = fed(*(raw[a:b] for a, b in itertools.pairwise(edges)))
    stream.on_end()

    assert EVENTS == owner.relayed
    assert (Reason.TRANSFER_FAILED, "late") == (owner.failure.reason, owner.failure.detail)
    assert Witness.LEG is owner.failure.witness


def test_an_error_event_counts_also_when_the_connection_breaks_after_it() -> None:
    owner, stream = fed(EVENTS, ERROR)
    stream.on_lost(Reason.ENGINE_DIED, "reset")

    assert Reason.TRANSFER_FAILED is owner.failure.reason


def test_text_that_speaks_of_errors_is_text() -> None:
    text = b'data: {"choices":[{"text":"say data: {\\"error\\": 1}"}]}\n\n'
    owner, stream = fed(text + DONE)
    stream.on_end()

    assert text + DONE == owner.relayed


def test_a_stream_without_its_end_is_a_failure_that_the_router_saw() -> None:
    owner, stream = fed(EVENTS)
    stream.on_end()

    assert (Reason.PEER_FAILED, Witness.ROUTER) == (owner.failure.reason, owner.failure.witness)


def test_half_an_event_is_not_passed_on_when_the_connection_breaks() -> None:
    owner, stream = fed(EVENTS, b'data: {"cho')
    stream.on_lost(Reason.ENGINE_DIED, "reset")

    assert EVENTS == owner.relayed
    assert (Reason.ENGINE_DIED, 502) == (owner.failure.reason, owner.failure.status)


def test_a_connection_that_breaks_behind_the_end_breaks_nothing() -> None:
    owner, stream = fed(EVENTS + DONE)
    stream.on_lost(Reason.ENGINE_DIED, "reset")

    assert [LegAnswered(KEY, Role.DECODE)] == owner.ends


def test_an_event_without_end_is_bounded() -> None:
    owner, _ = fed(b"data: ", b"x" * (EVENT_BYTES_MAX + 1))

    assert Reason.WIRE_ERROR is owner.failure.reason


def test_a_refused_stream_is_read_as_an_error() -> None:
    owner, stream = fed(b'{"error":{"message":"full","code":"RoomInUse"}}', status=503)
    stream.on_end()

    assert b"" == owner.relayed
    assert (Reason.ROOM_IN_USE, 503) == (owner.failure.reason, owner.failure.status)


@pytest.mark.parametrize("role", list(Role))
def test_only_decodes_answer_is_an_answer(role: Role) -> None:
    owner = Owner()
    leg = LegAnswer(owner, KEY, role)
    leg.on_head(200, {b"content-type": b"application/json"})
    for piece in (b"{", b"}"):
        leg.on_part(piece)
        leg.on_fed()
    leg.on_end()

    wanted = role is Role.DECODE
    assert ([(b"{}", b"application/json")] if wanted else []) == owner.answers
    assert (2 if wanted else 0) == owner.progress
    assert [LegAnswered(KEY, role)] == owner.ends


@pytest.mark.parametrize(
    ("status", "headers", "body", "reason", "detail"),
    [
        (500, {}, b'{"error":{"message":"m","code":"Stalled"}}', Reason.STALLED, "m"),
        (500, {b"x-pd-reason": b"Stalled"}, b"text", Reason.STALLED, "text"),
        (400, {}, b'{"object":"error","message":"m","code":400}', Reason.INVALID_REQUEST, "m"),
        (400, {}, b'{"error":{"message":"m"}}', Reason.INVALID_REQUEST, "m"),
        (503, {}, b'{"error":"m"}', Reason.NOT_READY, "m"),
        (429, {}, b"", Reason.OVERLOADED, ""),
        (500, {b"x-pd-reason": b"Nonsense"}, b"[1]", Reason.MODEL_FAILED, "[1]"),
        (500, {}, b"\xff\xfe", Reason.MODEL_FAILED, "\ufffd\ufffd"),
    ],
)
def test_errors_of_every_shape_are_read(
    status: int, headers: dict[bytes, bytes], body: bytes, reason: Reason, detail: str
) -> None:
    assert (reason, detail) == read_error(status, headers, body)


@given(st.binary(max_size=200))
def test_reading_an_error_never_fails(body: bytes) -> None:
    reason, detail = read_error(500, {}, body)

    assert reason in Reason
    assert isinstance(detail, str)


def test_an_engine_that_does_not_believe_us_is_not_the_clients_fault() -> None:
    owner: Any = Owner()
    leg = LegAnswer(owner, KEY, Role.PREFILL)
    leg.on_head(401, {b"x-pd-reason": b"Unauthorized"})
    leg.on_end()

    assert (Reason.UNAUTHORIZED, 502) == (owner.failure.reason, owner.failure.status)
