"""Who may speak: HMAC-SHA256 with the cluster's key over HTTP requests and over control frames.

Every process has a *session*, random per start, and counts what it signs. A receiver keeps, per
sender's session, the newest counter and a window of the ones behind it, so a message that was
recorded and is sent again is refused while messages that overtake each other are not. A session
takes a place in that bounded table only after its MAC was right: without the key nobody fills it.

- HTTP: one header (`HEADER`) of version, key id, session, counter, authority and MAC. The MAC
  covers method, authority, request target with its query, the digest of the body, session and
  counter. The *authority* is the host and port that the sender dialled; a server takes only its
  own, whatever the request's `host` says, so what was signed for one server is worth nothing at
  another. An answer may be signed too; it is bound to the header of its request, so it needs no
  counter of its own.
- Frames: a `Stamp` (key id, sender's and receiver's session, counter) travels inside a frame, and
  the MAC covers all frames with their lengths. The receiver's session ties a frame to one process
  start, which leaves nothing to replay after a restart. HTTP has no such tie: what was signed
  before a server's restart is not known to be old there.

Two keys are valid during a rotation: everybody verifies with any key of the ring and signs with the
greatest key id, so a new key is first handed out everywhere under a smaller id or used last.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from pdcluster_protocol.errors import ConfigError, Unauthorized
from pdcluster_protocol.replays import ReplayWindows

HEADER: Final = "x-pd-auth"
KEY_BYTES_MIN: Final = 16
MAC_BYTES: Final = 32
COUNTER_MAX: Final = (1 << 63) - 1
HEADER_LENGTH_MAX: Final = 1024
FRAMED_MAX: Final = 1024
HTTP_WINDOW: Final = 1 << 16
"""Counters of HTTP, 8 KiB a session.

A request that waits for its new connection, or to be accepted on it, is overtaken by all that its
sender signs meanwhile, for any server: at 10,000 a second this is some six seconds, more than the
repeat of a lost SYN costs.
"""
_VERSION: Final = "2"
_ANSWER: Final = "answer"
"""What an answer has in place of an authority: it goes back where its request came from."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_COUNTER: Final = re.compile(r"[0-9]{1,19}")
_AUTHORITY: Final = re.compile(r"[A-Za-z0-9_:%.\-]{1,261}")
_MAC: Final = re.compile(r"[0-9a-f]{64}")


class KeyRing:
    """The keys of one cluster by key id; `current` signs, all verify.

    Raises:
        ConfigError: no key, a key shorter than 16 bytes, or a key id that does not fit a header.
    """

    __slots__ = ("_keys", "current")

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigError("keys: there is none; put one file of at least 16 bytes per key id")
        for key_id, key in keys.items():
            if _NAME.fullmatch(key_id) is None:
                raise ConfigError(
                    f"keys: {key_id!r} is no key id; use letters, digits, '.', '_', '-'"
                )
            if len(key) < KEY_BYTES_MIN:
                raise ConfigError(
                    f"keys: {key_id} has {len(key)} bytes; it must have at least {KEY_BYTES_MIN}"
                )
        self._keys = dict(keys)
        self.current: Final = max(self._keys)

    def key(self, key_id: str) -> bytes:
        """The key of this id.

        Raises:
            Unauthorized: the ring has no such key.
        """
        try:
            return self._keys[key_id]
        except KeyError:
            raise Unauthorized(f"key id {key_id[:64]!r} is unknown here") from None


class HttpSigner:
    """Signs the requests, and the answers, of one process."""

    __slots__ = ("_counter", "_framed", "_ring", "session")

    def __init__(self, ring: KeyRing, session: str) -> None:
        _require_session(session)
        self._ring = ring
        self._counter = 0
        self._framed: dict[tuple[str, str, str], bytes] = {}
        """By method, authority and target: the part of the MAC's input that hardly changes."""
        self.session: Final = session

    def sign(self, method: str, target: str, body: bytes, *, authority: str) -> str:
        """The value of `HEADER` for one request; every try needs its own.

        `target` is the request target as it is sent: path and query, percent-encoded. `authority`
        is the server that it is sent to, `host:port` as it is dialled.
        """
        place = _bare(authority)
        framed = self._framed.get((method, place, target))
        if framed is None:
            if len(self._framed) >= FRAMED_MAX:
                self._framed.clear()
            framed = _framed(method, place, target, self.session)
            self._framed[method, place, target] = framed
        return self._header(place, framed, body)

    def sign_answer(self, request: str, body: bytes) -> str:
        """The value of `HEADER` for the answer to the request that carried the header `request`."""
        return self._header(_ANSWER, _framed("ANSWER", _ANSWER, request, self.session), body)

    def _header(self, place: str, framed: bytes, body: bytes) -> str:
        self._counter += 1
        key_id = self._ring.current
        mac = _http_mac(self._ring.key(key_id), framed, self._counter, body)
        return f"{_VERSION};{key_id};{self.session};{self._counter};{place};{mac}"


class HttpVerifier:
    """Checks requests (and answers) and remembers counters per sender's session."""

    __slots__ = ("_ring", "_windows")

    def __init__(
        self, ring: KeyRing, *, window: int = HTTP_WINDOW, sessions_max: int = 4096
    ) -> None:
        self._ring = ring
        self._windows = ReplayWindows(size=window, sessions_max=sessions_max)

    def verify(
        self,
        header: str | None,
        method: str,
        target: str,
        body: bytes,
        *,
        authorities: Collection[str],
    ) -> str:
        """The session that signed this request.

        `authorities` are the names of this server, `host:port`: the configured one, and the one at
        which the connection arrived. Never take one from the request.

        Raises:
            Unauthorized: its detail names what is missing or wrong.
        """
        session, counter, authority = self._check(header, method, target, body)
        if authority not in map(_bare, authorities):
            raise Unauthorized(
                f"header {HEADER}: the request was signed for {authority}; this server is"
                f" {' or '.join(dict.fromkeys(authorities))}"
            )
        self._windows.accept(session, counter)
        return session

    def verify_answer(self, header: str | None, request: str, body: bytes) -> str:
        """The session that signed this answer to our request, which carried the header `request`.

        Raises:
            Unauthorized: its detail names what is missing or wrong.
        """
        return self._check(header, "ANSWER", request, body)[0]

    def _check(
        self, header: str | None, method: str, target: str, body: bytes
    ) -> tuple[str, int, str]:
        if not header:
            raise Unauthorized(f"header {HEADER} is missing; the request must be signed")
        key_id, session, counter, authority, mac = _split_header(header)
        framed = _framed(method, authority, target, session)
        expected = _http_mac(self._ring.key(key_id), framed, counter, body)
        if not hmac.compare_digest(expected, mac):
            raise Unauthorized(
                f"header {HEADER}: the MAC is wrong; key, method, target or body differ"
            )
        return session, counter, authority


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Who sent a set of frames to whom, and as which one: a part of what the MAC covers."""

    key_id: str
    sender: str
    receiver: str
    counter: int


class FrameSigner:
    """Stamps and signs the control frames of one process; counters run per receiver."""

    __slots__ = ("_counters", "_first", "_receivers_max", "_ring", "session")

    def __init__(self, ring: KeyRing, session: str, *, receivers_max: int = 4096) -> None:
        _require_session(session)
        self._ring = ring
        self._receivers_max = receivers_max
        self._counters: OrderedDict[str, int] = OrderedDict()
        self._first = 0
        self.session: Final = session

    def stamp(self, receiver: str) -> Stamp:
        """The stamp of the next message to this receiver's session."""
        counter = self._counters.pop(receiver, self._first) + 1
        self._counters[receiver] = counter
        if len(self._counters) > self._receivers_max:
            # A forgotten receiver that comes back must not see old counters again.
            self._first = max(self._first, self._counters.popitem(last=False)[1])
        return Stamp(self._ring.current, self.session, receiver, counter)

    def mac(self, frames: Iterable[bytes], stamp: Stamp) -> bytes:
        """32 bytes over all frames with their lengths; the stamp must be inside one of them."""
        return _frame_mac(self._ring.key(stamp.key_id), frames)


class FrameVerifier:
    """Checks the control frames that reach one receiver's session."""

    __slots__ = ("_ring", "_windows", "session")

    def __init__(
        self, ring: KeyRing, session: str, *, window: int = 1024, sessions_max: int = 4096
    ) -> None:
        _require_session(session)
        self._ring = ring
        self._windows = ReplayWindows(size=window, sessions_max=sessions_max)
        self.session: Final = session

    def verify(self, frames: Iterable[bytes], mac: bytes, stamp: Stamp) -> str:
        """The session that sent these frames; `stamp` was read from one of them.

        Raises:
            Unauthorized: its detail names what is wrong.
        """
        expected = _frame_mac(self._ring.key(stamp.key_id), frames)
        if not hmac.compare_digest(expected, mac):
            raise Unauthorized("the MAC of the frames is wrong")
        if stamp.receiver != self.session:
            raise Unauthorized(f"the frames are for session {stamp.receiver[:64]!r}, not for ours")
        if not 1 <= stamp.counter <= COUNTER_MAX:
            raise Unauthorized(f"counter {stamp.counter} is out of range")
        self._windows.accept(stamp.sender, stamp.counter)
        return stamp.sender


def _require_session(session: str) -> None:
    if _NAME.fullmatch(session) is None:
        raise ConfigError(f"session {session!r}: use 1 to 128 letters, digits, '.', '_', '/', '-'")


def own_authorities(host: str, port: int, sockname: object) -> tuple[str, ...]:
    """The names of a server: as it is configured, and as the connection found it.

    `sockname` is the own end of the connection, as sockets tell it; behind a wildcard address or
    port 0 only that is a name that others dial.
    """
    configured = f"{host}:{port}"
    if not isinstance(sockname, tuple) or len(sockname) < 2:
        return (configured,)
    return configured, f"{str(sockname[0]).removeprefix('::ffff:')}:{sockname[1]}"


def _bare(authority: str) -> str:
    """`host:port` in its one form: without the brackets that a URL puts around IPv6."""
    return authority.replace("[", "").replace("]", "").lower()


def _split_header(header: str) -> tuple[str, str, int, str, str]:
    """Key id, session, counter, authority and MAC of a header's value.

    Raises:
        Unauthorized: it has another form; no part of it is trusted yet.
    """
    parts = header.split(";", 6) if len(header) <= HEADER_LENGTH_MAX else []
    if parts and parts[0] != _VERSION:
        raise Unauthorized(f"header {HEADER}: version {parts[0][:8]!r} is unknown; send {_VERSION}")
    if len(parts) != 6:
        raise Unauthorized(f"header {HEADER} must be version;key-id;session;counter;authority;mac")
    _, key_id, session, counter, authority, mac = parts
    for name, pattern, value in (
        ("key id", _NAME, key_id),
        ("session", _NAME, session),
        ("counter", _COUNTER, counter),
        ("authority", _AUTHORITY, authority),
        ("mac", _MAC, mac),
    ):
        if pattern.fullmatch(value) is None:
            raise Unauthorized(f"header {HEADER}: {name} {value[:64]!r} is malformed")
    if not 1 <= int(counter) <= COUNTER_MAX:
        raise Unauthorized(f"header {HEADER}: counter {counter} is out of range")
    return key_id, session, int(counter), authority, mac


def _framed(*fields: str) -> bytes:
    """Every field with its length in front, so no two requests give the same bytes."""
    raws = [field.encode("utf-8", "surrogateescape") for field in fields]
    return b"".join([part for raw in raws for part in (len(raw).to_bytes(8, "big"), raw)])


def _http_mac(key: bytes, framed: bytes, counter: int, body: bytes) -> str:
    message = b"pd-http-2" + framed + _framed(str(counter)) + hashlib.sha256(body).digest()
    return hmac.digest(key, message, "sha256").hex()


def _frame_mac(key: bytes, frames: Iterable[bytes]) -> bytes:
    # One call: a message has a dozen frames, and updating by each cost four times the hash.
    parts = [part for frame in frames for part in (len(frame).to_bytes(8, "big"), frame)]
    return hmac.digest(key, b"pd-frames-1" + b"".join(parts), "sha256")
