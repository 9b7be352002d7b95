"""What a router says to sidecars over HTTP, below `/pd/v1/`; always signed.

`POST hello` exchanges `messages.InstanceCard`s; the other bodies are here.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdcluster_protocol.errors import Reason, WireError
from pdcluster_protocol.ids import Key
from pdcluster_protocol.messages import Load
from pdcluster_protocol.undecodable import UNDECODABLE

BodyT = TypeVar("BodyT")


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of `POST /pd/v1/abort`: exact names; an empty or unknown one cancels nothing."""

    rid: str
    key: Key | None = None
    reason: Reason = Reason.ABORTED


class LoadReport(msgspec.Struct, frozen=True):
    """Answer of `GET /pd/v1/load`: one entry per DP rank."""

    incarnation: str
    ready: bool
    draining: bool
    loads: tuple[Load, ...]


def decode_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """A body, or an answer, of one of these paths.

    Raises:
        WireError: naming the kind and what is wrong with it.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise WireError(f"undecodable {kind.__name__}: {error}") from error
