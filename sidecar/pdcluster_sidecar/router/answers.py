"""What legs bring: a status from prefill, and from decode an answer or a stream of events.

A stream is passed on in whole events only. So an error event is never passed on as if it were
text, and where the engine's connection breaks inside an event, ours can still end with an error
event that the client is able to read.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from pdcluster_protocol.errors import HTTP_STATUS, Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.pair import LegAnswered, LegFailed, Witness
from pdcluster_protocol.undecodable import UNDECODABLE
from pdcluster_sidecar.router.replies import DONE

REASON_HEADER: Final = b"x-pd-reason"
ERROR_EVENT: Final = b'data: {"error"'
ERROR_BYTES_MAX: Final = 64 << 10
EVENT_BYTES_MAX: Final = 1 << 20
ANSWER_BYTES_MAX: Final = 64 << 20
DETAIL_CHARACTERS_MAX: Final = 2000
UNNAMED: Final = {
    400: Reason.INVALID_REQUEST,
    401: Reason.UNAUTHORIZED,
    403: Reason.UNAUTHORIZED,
    404: Reason.UNSUPPORTED,
    413: Reason.TOO_LARGE,
    422: Reason.INVALID_REQUEST,
    429: Reason.OVERLOADED,
    503: Reason.NOT_READY,
}
"""The reason of a status from an engine that names none; what is not listed failed inside it."""


class LegOwner(Protocol):
    """The sequence that a leg belongs to."""

    def leg_ended(self, event: LegAnswered | LegFailed) -> None: ...

    def leg_progressed(self, key: Key) -> None: ...

    def relay(self, key: Key, events: bytes) -> None: ...

    def take_answer(self, key: Key, body: bytes, content_type: bytes) -> None: ...


class LegAnswer:
    """Collects an answer whole: prefill's, and decode's where the client does not stream."""

    __slots__ = ("_body", "_body_bytes", "_headers", "_key", "_owner", "_role", "_status")

    def __init__(self, owner: LegOwner, key: Key, role: Role) -> None:
        self._owner = owner
        self._key = key
        self._role = role
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._headers = headers

    def on_part(self, part: bytes) -> None:
        self._body_bytes += len(part)
        if self._body_bytes <= ANSWER_BYTES_MAX and (self._wanted or not self._ok):
            self._body.append(part)

    def on_fed(self) -> None:
        if self._wanted:
            self._owner.leg_progressed(self._key)

    def on_end(self) -> None:
        if not self._ok:
            body = b"".join(self._body)[:ERROR_BYTES_MAX]
            self._fail_as(self._status, self._headers, body)
            return
        if self._body_bytes > ANSWER_BYTES_MAX:
            detail = f"{self._role} answered more than {ANSWER_BYTES_MAX} bytes"
            self._fail(Reason.WIRE_ERROR, detail, status=502)
            return
        if self._wanted:
            content_type = self._headers.get(b"content-type", b"application/json")
            self._owner.take_answer(self._key, b"".join(self._body), content_type)
        self._owner.leg_ended(LegAnswered(self._key, self._role))

    def on_lost(self, reason: Reason, detail: str) -> None:
        self._fail(reason, detail, status=502)

    @property
    def _ok(self) -> bool:
        return 200 <= self._status < 300

    @property
    def _wanted(self) -> bool:
        return self._role is Role.DECODE

    def _fail(self, reason: Reason, detail: str, *, status: int) -> None:
        self._owner.leg_ended(
            LegFailed(self._key, self._role, reason, detail, witness=Witness.ROUTER, status=status)
        )

    def _fail_as(self, status: int, headers: dict[bytes, bytes], body: bytes) -> None:
        reason, detail = read_error(status, headers, body)
        self._owner.leg_ended(
            LegFailed(
                self._key,
                self._role,
                reason,
                detail or f"{self._role} answered {status}",
                status=_client_status(status, reason),
            )
        )


class LegStream(LegAnswer):
    """Passes decode's events on as they come; an answer that is no stream is collected."""

    __slots__ = ("_done", "_error", "_rest")

    def __init__(self, owner: LegOwner, key: Key) -> None:
        super().__init__(owner, key, Role.DECODE)
        self._rest = b""
        self._error: bytes | None = None
        self._done = False

    def on_part(self, part: bytes) -> None:
        if self._status == 200:
            self._rest = self._rest + part if self._rest else part
        else:
            super().on_part(part)

    def on_fed(self) -> None:
        events = self._rest
        if not events:
            return
        if not events.endswith(b"\n\n"):
            cut = events.rfind(b"\n\n") + 2
            if cut < 2:
                self._bound_rest()
                return
            self._rest = events[cut:]
            events = events[:cut]
        else:
            self._rest = b""
        self._pass_on(events)

    def on_end(self) -> None:
        if not self._ok:
            super().on_end()
        elif self._error is not None:
            self._fail_as(500, {}, self._error.partition(b"\n")[0].removeprefix(b"data: "))
        elif self._done:
            self._owner.leg_ended(LegAnswered(self._key, Role.DECODE))
        else:
            detail = "decode's stream ended before its end"
            self._fail(Reason.PEER_FAILED, detail, status=502)

    def on_lost(self, reason: Reason, detail: str) -> None:
        if self._done or self._error is not None:
            # What mattered has come; how the connection then ended does not.
            self._status = 200
            self.on_end()
        else:
            super().on_lost(reason, detail)

    def _pass_on(self, events: bytes) -> None:
        at = events.find(ERROR_EVENT)
        if at > 0 and events[at - 1] != 0x0A:
            at = -1
        if at >= 0 and self._error is None:
            self._error = events[at : at + ERROR_BYTES_MAX]
            events = events[:at]
        elif self._error is not None:
            return
        if events:
            self._done = events.endswith(DONE)
            self._owner.relay(self._key, events)

    def _bound_rest(self) -> None:
        if len(self._rest) > EVENT_BYTES_MAX:
            self._rest = b""
            detail = f"decode sent an event longer than {EVENT_BYTES_MAX} bytes"
            self._fail(Reason.WIRE_ERROR, detail, status=502)


def read_error(status: int, headers: dict[bytes, bytes], body: bytes) -> tuple[Reason, str]:
    """Reason and detail of an engine's error: ours, OpenAI's and SGLang's shapes, or plain text."""
    try:
        whole = msgspec.json.decode(body, type=dict[str, object])
    except UNDECODABLE:
        whole = {"message": body.decode(errors="replace")}
    error = whole.get("error", whole)
    fields = error if isinstance(error, dict) else {"message": error}
    named = (headers.get(REASON_HEADER, b"").decode("latin-1"), fields.get("code"))
    detail = str(fields.get("message") or "")[:DETAIL_CHARACTERS_MAX]
    for name in named:
        if isinstance(name, str) and name in Reason.__members__.values():
            return Reason(name), detail
    return UNNAMED.get(status, Reason.MODEL_FAILED), detail


def _client_status(status: int, reason: Reason) -> int | None:
    """The status for the client: an engine's 4xx is the client's, unless it is about us."""
    if reason is Reason.UNAUTHORIZED:
        return 502
    if 400 <= status < 500:
        return status
    return HTTP_STATUS.get(reason, 500)
