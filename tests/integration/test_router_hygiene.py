"""What a hostile or careless client may send: a table of bytes, thrown at a real router process.

Each line is refused or served as it says, and behind a refusal nothing of the same connection is
looked at: no request of one client can become a part of another one's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from support.router_process import RawAnswer, RouterProcess

BODY = b'{"prompt":"hello","seed":1}'
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
CHUNKS = b"1b\r\n%b\r\n0\r\n\r\n" % BODY


class Case(NamedTuple):
    """Bytes, and what the first answer to them is."""

    name: str
    raw: bytes
    status: int = 400

    def __str__(self) -> str:
        return self.name


def sized(length: bytes) -> bytes:
    """A request whose length is written so."""
    return POST + b"content-length:" + length + b"\r\n\r\n" + BODY


def encoded(encoding: bytes) -> bytes:
    """A chunked request whose encoding is written so."""
    return POST + encoding + b"\r\n\r\n" + CHUNKS


def headed(line: bytes) -> bytes:
    """A request with this line among its headers."""
    return POST + line + b"\r\ncontent-length: 27\r\n\r\n" + BODY


def chunk(size: bytes, *, ending: bytes = b"\r\n") -> bytes:
    """A request whose only chunk has its size written so."""
    return CHUNKED + size + b"\r\n" + BODY + ending + b"0\r\n\r\n"


REFUSED = [
    # two lengths, or one that can be read in two ways
    Case("length, then encoding", encoded(b"content-length: 5\r\ntransfer-encoding: chunked")),
    Case("encoding, then length", encoded(b"transfer-encoding: chunked\r\ncontent-length: 5")),
    Case("two lengths", sized(b" 27\r\ncontent-length: 28")),
    Case("the same length twice", sized(b" 27\r\ncontent-length: 27")),
    Case("a list of lengths", sized(b" 27, 27")),
    Case("a length with a sign", sized(b" +27")),
    Case("a negative length", sized(b" -27")),
    Case("a space inside a length", sized(b" 2 7")),
    Case("a hexadecimal length", sized(b" 0x1b")),
    Case("a length with an exponent", sized(b" 2e1")),
    Case("a length in other digits", sized(" \uff12\uff17".encode())),
    Case("an empty length", sized(b" ")),
    Case("a length that overflows", sized(b" 18446744073709551643")),
    Case("a length above the bound", sized(b" 10000000000000000000"), 413),
    # encodings that one program knows and another one does not
    Case("encoding xchunked", encoded(b"transfer-encoding: xchunked")),
    Case("encoding gzip, chunked", encoded(b"transfer-encoding: gzip, chunked")),
    Case("encoding chunked, identity", encoded(b"transfer-encoding: chunked, identity")),
    Case("encoding chunked twice", encoded(b"transfer-encoding: chunked, chunked")),
    Case("two encodings", encoded(b"transfer-encoding: chunked\r\ntransfer-encoding: identity")),
    Case("encoding with a parameter", encoded(b"transfer-encoding: chunked;q=1")),
    Case("encoding in quotes", encoded(b'transfer-encoding: "chunked"')),
    Case("encoding behind a vertical tab", encoded(b"transfer-encoding: \x0bchunked")),
    Case("encoding before NUL", encoded(b"transfer-encoding: chunked\x00")),
    Case("encoding before a space", encoded(b"transfer-encoding: chunked ")),
    Case("encoding on a folded line", encoded(b"transfer-encoding:\r\n chunked")),
    Case("encoding that goes on folded", encoded(b"transfer-encoding: chunked\r\n , identity")),
    Case("a space before the colon", encoded(b"transfer-encoding : chunked")),
    Case("an empty encoding", encoded(b"transfer-encoding:")),
    Case(
        "an encoding in HTTP/1.0",
        b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    ),
    # chunks
    Case("a chunk size of other letters", chunk(b"zz")),
    Case("a negative chunk size", chunk(b"-1")),
    Case("a chunk size with 0x", chunk(b"0x1b")),
    Case("a chunk size with a sign", chunk(b"+1b")),
    Case("a space before a chunk size", chunk(b" 1b")),
    Case("a space behind a chunk size", chunk(b"1b ")),
    Case("no chunk size", chunk(b"")),
    Case("a chunk size that overflows", chunk(b"1000000000000001b")),
    Case("a chunk size before a bare LF", CHUNKED + b"1b\n" + BODY + b"\r\n0\r\n\r\n"),
    Case("a chunk longer than its size", chunk(b"1a")),
    Case("a chunk without its end", chunk(b"1b", ending=b"")),
    Case("a chunk before a bare LF", chunk(b"1b", ending=b"\n")),
    Case("NUL in a chunk extension", chunk(b"1b;a=\x00")),
    Case("an endless chunk extension", chunk(b"1b;" + b"a" * (2 << 20))),
    Case("a length among the trailers", CHUNKED + CHUNKS[:-2] + b"content-length: 5\r\n\r\n"),
    Case("a malformed trailer", CHUNKED + CHUNKS[:-2] + b"nonsense\r\n\r\n"),
    Case("endless trailers", CHUNKED + CHUNKS[:-2] + b"x: 1\r\n" * 200 + b"\r\n", 431),
    # lines and characters
    Case("bare LFs", GET.replace(b"\r\n", b"\n")),
    Case("a bare LF behind a header", POST + b"x: y\n" + b"content-length: 27\r\n\r\n" + BODY),
    Case("a bare CR in a header", headed(b"x: a\rb: c")),
    Case("NUL in a header", headed(b"x: a\x00b")),
    Case("NUL in a header's name", headed(b"x\x00y: a")),
    Case("NUL in the path", b"GET /hea\x00lth HTTP/1.1\r\nhost: x\r\n\r\n"),
    Case("a control character in a header", headed(b"x: a\x01b")),
    Case("another alphabet in a name", headed(b"x\xff: a")),
    Case("a header without a name", headed(b": a")),
    Case("a header without a colon", headed(b"bad header")),
    Case("a folded header", headed(b"x: a\r\n b")),
    Case("a folded first header", b"GET /health HTTP/1.1\r\n x: y\r\nhost: x\r\n\r\n"),
    Case("two hosts", headed(b"host: y")),
    Case("the same host twice", headed(b"host: x")),
    Case("no host", b"GET /health HTTP/1.1\r\n\r\n"),
    # first lines
    Case("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Case("no request", b"nonsense\r\n\r\n"),
    Case("a method in small letters", b"get /health HTTP/1.1\r\nhost: x\r\n\r\n"),
    Case("an unknown method", b"FETCH /health HTTP/1.1\r\nhost: x\r\n\r\n"),
    Case("a tab in the first line", b"GET\t/health HTTP/1.1\r\nhost: x\r\n\r\n"),
    Case("a space in the path", b"GET /he alth HTTP/1.1\r\nhost: x\r\n\r\n"),
    Case("a space behind the version", b"GET /health HTTP/1.1 \r\nhost: x\r\n\r\n"),
    Case("a version of two digits", b"GET /health HTTP/1.10\r\nhost: x\r\n\r\n"),
    Case("an unknown version", b"GET /health HTTP/1.2\r\nhost: x\r\n\r\n"),
    Case("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Case("HTTP/2.0 by name", b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n", 505),
    Case("HTTP/0.9", b"GET /health\r\n\r\n", 505),
    # what is too long
    Case("a long path", b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"y" * 9000), 414),
    Case("a long query", b"GET /health?%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"y" * 9000), 414),
    Case("a long header", headed(b"x: " + b"y" * 40_000), 431),
    Case("a long name", headed(b"y" * 40_000 + b": x"), 431),
    Case("many headers", headed(b"\r\n".join(b"x%d: y" % each for each in range(200))), 431),
    Case("one header many times", headed(b"\r\n".join([b"x: y"] * 8000)), 431),
    Case("another expectation", headed(b"expect: 200-ok"), 417),
]

SERVED = [
    Case("spaces around a length", sized(b" \t27 \t"), 200),
    Case("a length with zeros in front", sized(b" 0027"), 200),
    Case("the encoding in capitals", encoded(b"TRANSFER-ENCODING: CHUNKED"), 200),
    Case("chunk extensions", CHUNKED + b'1b;a=b;c="d"\r\n' + BODY + b"\r\n0;z\r\n\r\n", 200),
    Case("trailers", CHUNKED + CHUNKS[:-2] + b"x-checksum: 1\r\nhost: y\r\n\r\n", 200),
    Case("zeros before a chunk size", chunk(b"0" * 20 + b"1b"), 200),
    Case(
        "a chunk for each byte",
        CHUNKED + b"".join(b"1\r\n%c\r\n" % b for b in BODY) + b"0\r\n\r\n",
        200,
    ),
    Case("another alphabet in a value", headed(b"x: \xff"), 200),
    Case("empty lines in front", b"\r\n\r\n" + headed(b"x: y"), 200),
    Case(
        "the absolute form",
        b"POST http://y/v1/completions?a=b HTTP/1.1\r\nhost: x\r\ncontent-length: 27\r\n\r\n"
        + BODY,
        200,
    ),
]

BESIDE = [
    Case(
        "a GET with a body",
        b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
        200,
    ),
    Case(
        "a GET with a chunked body",
        b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
        200,
    ),
    Case("a POST without a body", POST + b"\r\n", 400),
    Case("an absolute form without a path", b"GET http://y HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    Case("OPTIONS *", b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404),
]

METHODS = [
    ("/v1/completions", "GET", "POST"),
    ("/v1/completions", "PUT", "POST"),
    ("/v1/chat/completions", "DELETE", "POST"),
    ("/generate", "GET", "POST, PUT"),
    ("/health", "TRACE", "GET, HEAD"),
    ("/v1/models", "DELETE", "GET, HEAD"),
    ("/v1/models/tiny", "POST", "GET, HEAD"),
]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("router")).running() as process:
        yield process


def ask(router: RouterProcess, raw: bytes) -> tuple[RawAnswer, bytes]:
    """The first answer, and all that comes behind it."""
    with router.connect() as client:
        client.send(raw)
        return client.answer(), client.rest()


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_is_refused_ends_its_connection_and_reaches_nobody(
    router: RouterProcess, case: Case
) -> None:
    before = len(router.legs)
    # What is smuggled behind it is no request.
    answer, rest = ask(router, case.raw + POST + b"content-length: 27\r\n\r\n" + BODY)

    assert (case.status, "close") == (answer.status, answer.headers["connection"])
    assert answer.code in {"InvalidRequest", "TooLarge", "Unsupported"}
    assert b"" == rest
    assert before == len(router.legs)


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_what_is_unusual_but_clear_is_served_and_the_connection_goes_on(
    router: RouterProcess, case: Case
) -> None:
    with router.connect() as client:
        client.send(case.raw + GET)

        answer = client.answer()
        assert case.status == answer.status
        assert "5/1" == json.loads(answer.body)["choices"][0]["text"]
        assert b"OK" == client.answer().body


@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_what_means_nothing_here_is_answered_and_the_connection_goes_on(
    router: RouterProcess, case: Case
) -> None:
    with router.connect() as client:
        client.send(case.raw + GET)

        assert case.status == client.answer().status
        assert b"OK" == client.answer().body


@pytest.mark.parametrize(("path", "method", "allowed"), METHODS)
def test_another_method_is_told_which_are_allowed(
    router: RouterProcess, path: str, method: str, allowed: str
) -> None:
    with router.connect() as client:
        client.send(
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode() + GET
        )

        answer = client.answer()
        assert (405, allowed) == (answer.status, answer.headers["allow"])
        assert b"OK" == client.answer().body


def test_a_tunnel_is_not_opened(router: RouterProcess) -> None:
    answer, rest = ask(router, b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n" + GET)

    assert (404, b"") == (answer.status, rest)


def test_the_router_serves_as_before(router: RouterProcess) -> None:
    assert router.rss_bytes() < 90 << 20
    with router.connect() as client:
        client.send(sized(b" 27"))
        assert 200 == client.answer().status


def test_a_body_is_invited_once_and_not_when_it_is_there(router: RouterProcess) -> None:
    with router.connect() as client:
        client.send(POST + b"expect: 100-Continue\r\ncontent-length: 27\r\n\r\n")
        assert 100 == client.answer().status
        client.send(BODY + GET)
        assert 200 == client.answer().status
        assert b"OK" == client.answer().body


def test_http_1_0_is_not_invited(router: RouterProcess) -> None:
    head = b"POST /v1/completions HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 27\r\n\r\n"
    answer, rest = ask(router, head + BODY)

    assert (200, b"") == (answer.status, rest)
