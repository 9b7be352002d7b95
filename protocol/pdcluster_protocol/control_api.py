"""What a router says to sidecars over HTTP, below `/pd/v1/`; always signed.

`POST hello` exchanges `messages.InstanceCard`s; the other bodies are here.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key
from pdcluster_protocol.messages import Load


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
