"""What is said against a request before its body: framing, version, sizes, expectations.

Whatever two programs could understand in two ways is refused, with the connection closed, since
nobody knows where the next request would begin: that is how requests are smuggled past a proxy.
"""

from __future__ import annotations

from typing import Final

from pdcluster_protocol.errors import Reason
from pdcluster_sidecar.router.exchange import Exchange
from pdcluster_sidecar.router.replies import Failure

URL_BYTES_MAX: Final = 8 << 10
HEAD_BYTES_MAX: Final = 32 << 10
HEADERS_MAX: Final = 128
FRAMING_BYTES_MAX: Final = 512 << 10
FRAMING_PER_BODY_BYTE: Final = 8
"""A chunk of one byte takes six; what is above that are extensions, of which nobody makes use."""
VERSIONS: Final = frozenset({"1.0", "1.1"})
SINGLE_HEADERS: Final = frozenset({b"host", b"transfer-encoding", b"content-length"})
SHOWN_BYTES_MAX: Final = 64


def path_of(url: str) -> str:
    """The path of a request target, which proxies may send in its absolute form."""
    if not url.startswith("/") and "://" in url[:8]:
        url = "/" + url.split("://", 1)[1].partition("/")[2]
    return url.partition("?")[0]


def refusal_of_head(exchange: Exchange, version: str, *, body_bytes_max: int) -> Failure | None:
    """Why a request is not served, as far as its complete head shows it."""
    headers = exchange.headers
    if version not in VERSIONS:
        return Failure(
            status=505,
            reason=Reason.UNSUPPORTED,
            message=f"the request is HTTP/{version}; send HTTP/1.1",
            close=True,
        )
    encoding = headers.get(b"transfer-encoding")
    if encoding is not None and (refusal := _refusal_of_encoding(exchange, encoding)) is not None:
        return refusal
    if exchange.modern and b"host" not in headers:
        return bad("header host is missing; HTTP/1.1 needs it")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > body_bytes_max:
        return too_large(body_bytes_max)
    expected = headers.get(b"expect", b"100-continue")
    if expected.lower() != b"100-continue":
        return Failure(
            status=417,
            reason=Reason.UNSUPPORTED,
            message=f"header expect is {_shown(expected)}; send 100-continue or none",
            close=True,
        )
    return None


def _refusal_of_encoding(exchange: Exchange, encoding: bytes) -> Failure | None:
    if b"content-length" in exchange.headers:
        return bad("the request has content-length and transfer-encoding; send one of them")
    if encoding.lower() != b"chunked":
        return bad(f"transfer-encoding is {_shown(encoding)}; send chunked")
    if not exchange.modern:
        return bad("transfer-encoding is given, but HTTP/1.0 has none; send content-length")
    return None


def _shown(value: bytes) -> str:
    return value[:SHOWN_BYTES_MAX].decode("latin-1")


# --- refusals -----------------------------------------------------------------------------------


def bad(message: str) -> Failure:
    """What is malformed, or has two meanings."""
    return Failure(status=400, reason=Reason.INVALID_REQUEST, message=message, close=True)


def too_late(what: str, seconds: float) -> Failure:
    """What did not arrive in time."""
    message = f"{what} did not arrive within {seconds:g} s"
    return Failure(status=408, reason=Reason.DEADLINE_EXCEEDED, message=message, close=True)


def too_large(bytes_max: int) -> Failure:
    """A body above the bound."""
    message = f"the body is too large; send at most {bytes_max} bytes"
    return Failure(status=413, reason=Reason.TOO_LARGE, message=message, close=True)


def url_too_long() -> Failure:
    """A request target above the bound."""
    message = f"the URL is longer than {URL_BYTES_MAX} bytes"
    return Failure(status=414, reason=Reason.TOO_LARGE, message=message, close=True)


def too_many_headers(message: str) -> Failure:
    """Headers or trailers above a bound, of their number or their size."""
    return Failure(status=431, reason=Reason.TOO_LARGE, message=message, close=True)


def overloaded(message: str) -> Failure:
    """More than this process takes on at once."""
    return Failure(
        status=429,
        reason=Reason.OVERLOADED,
        message=message,
        retry_after_seconds=1,
        close=True,
    )
