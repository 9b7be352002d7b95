"""Inputs of the nodes: what happened. Past tense, frozen.

The engine's owner thread makes them and gives each to `Node.handle` with the time. Peer input
arrives as `MessageArrived`; it may be anything and never raises.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import InstanceCard, NodeMessage, PeerState


class Joined(msgspec.Struct, frozen=True):
    """The sidecar answered a rank's hello: the instance's incarnation and its control address."""

    incarnation: str
    address: RankAddress
    rank: int = 0


class TransportReady(msgspec.Struct, frozen=True):
    """A rank's transport (re)started: a new session, and where its arena is mapped for peers.

    Every write that was outstanding before is lost; that an earlier session is gone is the fence.
    """

    session: str
    base_address: int
    rank: int = 0


class TransportLost(msgspec.Struct, frozen=True):
    """A rank's transport ended (died, or was fenced); until it is ready nothing can be written."""

    detail: str
    rank: int = 0


class LegArrived(msgspec.Struct, frozen=True):
    """A leg came over HTTP, validated; its token ids stay with the engine.

    `bootstrap` is None for a request that this engine computes alone.
    """

    key: Key
    rid: str
    prompt_tokens: int
    prompt_digest: str
    output_tokens_max: int
    bootstrap: RankAddress | None
    """The prefill instance's sidecar (HTTP); on a prefill leg: itself."""
    prefill_dp_rank: int | None = None
    budget_seconds: float | None = None
    attempt_known: bool = True
    """False: a foreign router minted no attempt, so the key's is 0."""


class LegCancelled(msgspec.Struct, frozen=True):
    """The client left, the router aborted, or the HTTP connection of the leg closed."""

    key: Key
    reason: Reason
    detail: str = ""


class PeerResolved(msgspec.Struct, frozen=True):
    """Answer to `ResolvePeer`: the card of the prefill instance, or why there is none."""

    bootstrap: RankAddress
    card: InstanceCard | None
    reason: Reason | None = None
    detail: str = ""


class MessageArrived(msgspec.Struct, frozen=True):
    """A checked and authenticated message of a peer's node; empty incarnation: a plain peer."""

    message: NodeMessage
    incarnation: str
    rank: int = 0
    """Which of our ranks it was sent to."""


class PeerStateChanged(msgspec.Struct, frozen=True):
    """Liveness of a peer instance; only `DEAD` ends its rooms."""

    incarnation: str
    state: PeerState
    detail: str = ""


class RowsWritten(msgspec.Struct, frozen=True):
    """Prefill: the rows [start, end) of one region are final in every rank that holds it."""

    key: Key
    region: int
    """An index into the whole model's layout."""
    start: int
    end: int


class PromptComputed(msgspec.Struct, frozen=True):
    """Prefill: all chunks are done, the first token is chosen, the metadata row is written."""

    key: Key


class ComputeStopped(msgspec.Struct, frozen=True):
    """The model side has let go of this key's pages, as asked or by a failure of its own."""

    key: Key
    reason: Reason | None = None
    detail: str = ""


class OperationDone(msgspec.Struct, frozen=True):
    """A `Write` or a `VerifyRun` ended.

    For a write `ok` False is no proof that it stopped. For a verification `digest` is what lies in
    the arena.
    """

    operation: int
    ok: bool
    digest: int = 0
    detail: str = ""


class MetadataRead(msgspec.Struct, frozen=True):
    """Decode: what every rank's metadata slot says; 0: one is not written, or they differ."""

    key: Key
    room: int


class DecodeFinished(msgspec.Struct, frozen=True):
    """The last token of this key is computed (decode or alone); its pages may go."""

    key: Key


class Drained(msgspec.Struct, frozen=True):
    """This engine takes nothing new."""

    reason: Reason = Reason.SHUTTING_DOWN


class Tick(msgspec.Struct, frozen=True):
    """A deadline came due."""


Event = (
    Joined
    | TransportReady
    | TransportLost
    | LegArrived
    | LegCancelled
    | PeerResolved
    | MessageArrived
    | PeerStateChanged
    | RowsWritten
    | PromptComputed
    | ComputeStopped
    | OperationDone
    | MetadataRead
    | DecodeFinished
    | Drained
    | Tick
)
