"""The bytes of our own answers: heads, errors in OpenAI's shape, error events of a stream."""

from __future__ import annotations

import http
from typing import Final

import msgspec

from pdcluster_protocol.errors import HTTP_STATUS, PDClusterError, Reason
from pdcluster_protocol.ids import Role

JSON: Final = b"application/json"
EVENT_STREAM: Final = b"text/event-stream"
DONE: Final = b"data: [DONE]\n\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
STATUS_LINES: Final = {
    **{
        status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
        for status in http.HTTPStatus
    },
    499: b"HTTP/1.1 499 Client Closed Request\r\n",
}
ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

Headers = tuple[tuple[bytes, bytes], ...]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is an error: what the client reads, in body and headers."""

    status: int
    reason: Reason
    message: str
    param: str | None = None
    leg: Role | None = None
    retry_after_seconds: int | None = None
    close: bool = False
    """The connection is of no more use, for instance after broken framing."""

    @classmethod
    def of(cls, error: PDClusterError) -> Failure:
        """The answer to a request that was refused with this error."""
        return cls(
            status=error.http_status,
            reason=error.reason,
            message=error.detail,
            param=getattr(error, "field", None),
        )

    @classmethod
    def because(cls, reason: Reason, message: str, *, status: int | None = None) -> Failure:
        """The usual answer of a reason."""
        return cls(status=status or HTTP_STATUS.get(reason, 500), reason=reason, message=message)

    def body(self) -> bytes:
        """The JSON of OpenAI's error shape; `leg` names the failing leg where there is one."""
        error: dict[str, object] = {
            "message": self.message,
            "type": ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "error"),
            "param": self.param,
            "code": self.reason,
        }
        if self.leg is not None:
            error["leg"] = self.leg
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The same as the last event of a stream that had begun; no `[DONE]` follows."""
        return b"data: %b\n\n" % self.body()

    def headers(self) -> Headers:
        headers: Headers = ((b"x-pd-reason", self.reason.encode()),)
        if self.retry_after_seconds is not None:
            headers += ((b"retry-after", b"%d" % self.retry_after_seconds),)
        return headers


def head(status: int, headers: Headers, *, content_type: bytes, framing: bytes) -> bytes:
    """Status line and headers; `framing` is the complete line of length or encoding, or empty."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"%bcontent-type: %b\r\n%b%b\r\n" % (
        STATUS_LINES[status],
        content_type,
        lines,
        framing,
    )


def chunk(payload: bytes) -> bytes:
    """One chunk of a chunked body; `payload` is not empty, since an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def header_value(text: str) -> bytes | None:
    """Text from outside as a header's value, or None where it could not be one."""
    if 1 <= len(text) <= 256 and text.isascii() and text.isprintable():
        return text.encode()
    return None
