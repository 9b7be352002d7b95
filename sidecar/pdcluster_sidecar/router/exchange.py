"""One request of a client, and the way to answer it exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from pdcluster_sidecar.router.replies import (
    EVENT_STREAM,
    JSON,
    LAST_CHUNK,
    Failure,
    Headers,
    chunk,
    head,
)

CLOSE: Final[Headers] = ((b"connection", b"close"),)
KEEP_ALIVE: Final[Headers] = ((b"connection", b"keep-alive"),)


class Way(Protocol):
    """What an exchange needs of the connection that it came on."""

    @property
    def lost(self) -> bool: ...

    @property
    def pressed(self) -> bool: ...

    def write(self, raw: bytes) -> None: ...

    def abort(self) -> None: ...

    def exchange_ended(self, exchange: Exchange) -> None: ...


class Exchange:
    """A request and its answer; `on_gone` and `on_pressure` tell what the client does meanwhile."""

    __slots__ = (
        "_connection",
        "_streams",
        "body",
        "body_bytes",
        "ended",
        "headers",
        "identity",
        "keep_alive",
        "method",
        "modern",
        "on_gone",
        "on_pressure",
        "path",
        "refusal",
        "whole",
    )

    def __init__(self, connection: Way) -> None:
        self._connection = connection
        self._streams = False
        self.method = ""
        self.path = ""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.body_bytes = 0
        """Counted against the bound of all bodies until the exchange has ended."""
        self.identity: Headers = ()
        """Headers of every answer: our id and the client's own."""
        self.keep_alive = True
        self.modern = True
        """HTTP/1.1: the client understands chunks."""
        self.whole = False
        self.ended = False
        self.refusal: Failure | None = None
        self.on_gone: Callable[[], None] | None = None
        self.on_pressure: Callable[[bool], None] | None = None

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self._connection.lost

    @property
    def pressed(self) -> bool:
        """Whether the client takes nothing more for now."""
        return self._connection.pressed

    @property
    def streams(self) -> bool:
        """Whether a streamed answer has begun."""
        return self._streams

    def answer(
        self, status: int, body: bytes, *, headers: Headers = (), content_type: bytes = JSON
    ) -> None:
        """Send the whole answer."""
        headers = (*self.identity, *headers, *self._persistence())
        framing = b"content-length: %d\r\n" % len(body)
        first = head(status, headers, content_type=content_type, framing=framing)
        self._connection.write(first if self.method == "HEAD" else first + body)
        self._end()

    def begin_stream(self, *, content_type: bytes = EVENT_STREAM) -> None:
        """Send the head of a streamed answer; its body ends with `end_stream` or `cut_stream`."""
        self._streams = True
        if not self.modern:
            self.keep_alive = False
        headers = (*self.identity, *self._persistence())
        framing = b"cache-control: no-cache\r\n"
        if self.modern:
            framing += b"transfer-encoding: chunked\r\n"
        self._connection.write(head(200, headers, content_type=content_type, framing=framing))

    def write(self, payload: bytes) -> None:
        """Send a part of a streamed answer."""
        self._connection.write(chunk(payload) if self.modern else payload)

    def end_stream(self) -> None:
        """End a streamed answer properly."""
        if self.modern:
            self._connection.write(LAST_CHUNK)
        self._end()

    def fail(self, failure: Failure) -> None:
        """Answer with an error: a whole answer, or the last event of a stream that had begun."""
        if self._streams:
            self.keep_alive = False
            self.write(failure.event())
            self.end_stream()
            return
        if failure.close:
            self.keep_alive = False
        self.answer(failure.status, failure.body(), headers=failure.headers())

    def drop(self) -> None:
        """Close the client's connection at once."""
        self._connection.abort()

    def _persistence(self) -> Headers:
        """What each version does not take for granted."""
        if not self.keep_alive:
            return CLOSE
        return () if self.modern else KEEP_ALIVE

    def _end(self) -> None:
        self.ended = True
        self.on_gone = self.on_pressure = None
        self._connection.exchange_ended(self)
