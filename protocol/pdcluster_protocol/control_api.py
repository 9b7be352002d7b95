"""What is said to sidecars over HTTP, below `/pd/v1/`; always signed.

Routers: `POST hello` exchanges `messages.InstanceCard`s; the other bodies are here, as JSON.
`GET load?while_ready=INCARNATION` is held while that incarnation is ready and does not drain.

The pods of one instance: the first one leads, the others call it, and it never calls them.
`POST pod/report` carries all that a pod knows, every time, so a lost one costs nothing; it goes out
five times a second and at once when something happened. `POST pod/orders` is held until there is
something to do; orders are numbered within a pair of sessions and stay until a later call says that
they have arrived. Bodies are msgpack, and the answers are signed too.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdcluster_protocol.errors import Reason, WireError
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import (
    CancelLeg,
    Drain,
    DumpRequested,
    EngineHello,
    HelloAnswer,
    InstanceCard,
    Load,
    PeerChanged,
    Pulse,
    Resolved,
)
from pdcluster_protocol.sidecar_messages import InstanceDied
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_protocol.undecodable import UNDECODABLE

BodyT = TypeVar("BodyT")
HELD_SECONDS = 1.0
"""How long a call for orders waits for one, and one for the load for a change."""


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of `POST /pd/v1/abort`: exact names; an empty or unknown one cancels nothing."""

    rid: str
    key: Key | None = None
    reason: Reason = Reason.ABORTED


class LoadReport(msgspec.Struct, frozen=True):
    """Answer of `GET /pd/v1/load`: one entry per DP rank."""

    incarnation: str
    ready: bool
    """Its ranks are linked and move."""
    draining: bool
    """It goes on with what it has begun and takes nothing new."""
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


class PodCard(msgspec.Struct, frozen=True):
    """One pod of an instance, as its sidecar says that it is."""

    node: int
    http: RankAddress
    """Of its sidecar; its ranks' control ports and engines are on the same host."""
    session: str
    """Of its sidecar's process."""


class Dump(msgspec.Struct, frozen=True):
    """What the ranks of one pod say of themselves, as JSON."""

    request: int
    ranks: tuple[tuple[RankCoordinate, bytes], ...]


class PodReport(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /pd/v1/pod/report`, from a pod to its leader."""

    cluster: str
    instance: str
    pod: PodCard
    incarnation: str = ""
    """That of its joined ranks; empty: none has joined."""
    hellos: tuple[EngineHello, ...] = ()
    """Of ranks that wait to be let in, without their tokenizer files."""
    pulses: tuple[tuple[RankCoordinate, Pulse], ...] = ()
    """The last one of each joined rank."""
    ended: tuple[InstanceDied, ...] = ()
    """Incarnations that ended there, the newest last; repeated, since a report may be lost."""
    questions: tuple[RankAddress, ...] = ()
    """Bootstrap addresses that its ranks ask about."""
    dumps: tuple[Dump, ...] = ()


class PodAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader answers to a report."""

    session: str
    """Of the leader's process: a new one knows nothing of the pod."""
    incarnation: str
    over: bool = False
    """The reported incarnation has ended, or another one has taken its place."""
    answers: tuple[tuple[RankCoordinate, HelloAnswer], ...] = ()
    missing: tuple[RankCoordinate, ...] = ()
    """Ranks that are joined there and unknown here: the leader was restarted."""
    drain: Drain | None = None
    """How far the instance's drain is; None: nobody drains."""


class OrdersAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /pd/v1/pod/orders`."""

    instance: str
    pod: PodCard
    leader: str = ""
    """The leader's session that `after` belongs to."""
    after: int = 0
    """Orders up to this number have arrived."""


class PeersKnown(msgspec.Struct, frozen=True, tag="PD_PEERS"):
    """These peers have been met; what is not named stays as it is."""

    cards: tuple[InstanceCard, ...]


Order = PeersKnown | PeerChanged | Resolved | CancelLeg | DumpRequested | InstanceDied


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader wants of a pod, numbered from `first` on."""

    session: str
    """Of the leader's process."""
    first: int
    orders: tuple[Order, ...]


def decode_pod_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """A body, or an answer, that pods of one instance exchange.

    Raises:
        WireError: it is undecodable, or a field in it is wrong.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNDECODABLE as error:
        raise WireError(f"{kind.__name__}: {error}") from error
