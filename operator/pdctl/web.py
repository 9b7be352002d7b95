"""Plain HTTP to our own processes: every call has a deadline, admin calls are signed."""

from __future__ import annotations

import http.client
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pdcluster_protocol.authentication import HEADER, HttpSigner, KeyRing
from pdcluster_protocol.errors import ConfigError, PDClusterError, Reason
from pdcluster_protocol.undecodable import UNDECODABLE

ANSWER_BYTES_MAX = 64 << 20
LINE_BYTES_MAX = 1 << 20


class Unreachable(PDClusterError):
    """Nobody answered at a URL, or not as HTTP."""

    reason = Reason.PEER_UNREACHABLE


class Answer(msgspec.Struct, frozen=True):
    """Status and body of one exchange."""

    status: int
    body: bytes

    def message(self) -> str:
        """The message of an error answer: that of the OpenAI shape, else the body's beginning."""
        try:
            error = msgspec.json.decode(self.body, type=_ErrorBody).error
        except UNDECODABLE:
            return self.body[:300].decode(errors="replace").strip()
        return f"{error.code}: {error.message}" if error.code else error.message


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


def signer(keys_folder: Path) -> HttpSigner:
    """Signs with the keys of a run.

    Raises:
        ConfigError: the folder cannot be read or holds no key.
    """
    try:
        keys = {path.name: path.read_bytes() for path in keys_folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"keys folder {keys_folder}: {error.strerror}") from error
    return HttpSigner(KeyRing(keys), f"pdctl-{secrets.token_hex(8)}")


def exchange(
    method: str,
    url: str,
    body: object = None,
    *,
    timeout_seconds: float,
    signed_by: HttpSigner | None = None,
) -> Answer:
    """One request, one answer.

    Raises:
        Unreachable: nobody answered in time.
        ConfigError: `url` is no http URL.
    """
    connection, target = _connection(url, timeout_seconds)
    try:
        response = _send(connection, method, target, body, signed_by)
        return Answer(response.status, response.read(ANSWER_BYTES_MAX))
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{url} does not answer: {_cause(error)}") from error
    finally:
        connection.close()


def stream(url: str, body: object, *, timeout_seconds: float) -> Iterator[bytes]:
    """The data of each server-sent event; `timeout_seconds` bounds the wait for each.

    Raises:
        Unreachable: nobody answered, or nothing more came in time.
        PDClusterError: the answer was an error.
    """
    connection, target = _connection(url, timeout_seconds)
    try:
        response = _send(connection, "POST", target, body, None)
        if response.status != 200:
            refused = Answer(response.status, response.read(ANSWER_BYTES_MAX))
            raise PDClusterError(
                f"{url} answered {refused.status}: {refused.message()}", reason=Reason.PEER_FAILED
            )
        while line := response.readline(LINE_BYTES_MAX):
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{url} does not answer: {_cause(error)}") from error
    finally:
        connection.close()


def _connection(url: str, timeout_seconds: float) -> tuple[http.client.HTTPConnection, str]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"url is {url!r}: {error}") from error
    if parts.scheme != "http" or not host:
        raise ConfigError(f"url is {url!r}; it must be like http://127.0.0.1:8000")
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    return http.client.HTTPConnection(host, port, timeout=timeout_seconds), target


def _send(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: object,
    signed_by: HttpSigner | None,
) -> http.client.HTTPResponse:
    encoded = b"" if body is None else msgspec.json.encode(body)
    headers = {"content-type": "application/json"} if encoded else {}
    if signed_by is not None:
        authority = f"{connection.host}:{connection.port}"
        headers[HEADER] = signed_by.sign(method, target, encoded, authority=authority)
    connection.request(method, target, body=encoded or None, headers=headers)
    return connection.getresponse()


def _cause(error: OSError | http.client.HTTPException) -> str:
    return str(error) or type(error).__name__
