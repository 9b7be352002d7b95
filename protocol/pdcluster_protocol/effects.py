"""Outputs of the nodes: what to do. Imperative, frozen.

The engine's executor turns each into an action; what comes of it returns as an event. An effect is
never retried by the executor: deadlines and repetition are the core's.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import NodeMessage


class ResolvePeer(msgspec.Struct, frozen=True):
    """Ask the sidecar who serves this bootstrap address; answered by `PeerResolved`."""

    bootstrap: RankAddress


class Send(msgspec.Struct, frozen=True):
    """Send a message to a peer's rank, through the sidecars."""

    to: RankAddress
    message: NodeMessage
    rank: int = 0
    """Which of our ranks sends it."""


class StartPrefill(msgspec.Struct, frozen=True):
    """Compute the prompt into these pages; write the first token's metadata row into `slot`.

    Answered by `RowsWritten`s and one `PromptComputed`, or by `ComputeStopped`.
    """

    key: Key
    pages: tuple[int, ...]
    slot: int


class StartDecode(msgspec.Struct, frozen=True):
    """The KV of the prompt lies verified in these pages, its first token in metadata slot `slot`.

    Read the row, then produce tokens. Answered by `DecodeFinished` or `ComputeStopped`.
    """

    key: Key
    pages: tuple[int, ...]
    slot: int


class StartAlone(msgspec.Struct, frozen=True):
    """Compute prompt and answer here; answered by `DecodeFinished` or `ComputeStopped`."""

    key: Key
    pages: tuple[int, ...]


class StopCompute(msgspec.Struct, frozen=True):
    """Stop at the next chunk or token; answered by `ComputeStopped` (also when nothing ran)."""

    key: Key


class Write(msgspec.Struct, frozen=True):
    """Write from a rank's arena to an absolute address at `target`.

    Parts of rows go over as many pieces of `nbytes` each, so many strides apart on both sides.
    Answered by one `OperationDone` with the digest of the source bytes, piece by piece.
    """

    operation: int
    target: str
    source_offset: int
    destination_address: int
    nbytes: int
    rank: int = 0
    pieces: int = 1
    source_stride: int = 0
    destination_stride: int = 0


class VerifyRun(msgspec.Struct, frozen=True):
    """Hash these bytes of a rank's arena, piece by piece; answered by `OperationDone`."""

    operation: int
    offset: int
    nbytes: int
    rank: int = 0
    pieces: int = 1
    stride: int = 0


class ReadMetadata(msgspec.Struct, frozen=True):
    """Read the room field of a slot in every rank's metadata; answered by `MetadataRead`."""

    key: Key
    slot: int


class ClearMetadata(msgspec.Struct, frozen=True):
    """Zero the room field of a slot in every rank's metadata before it is handed out again."""

    slot: int


class ConcludeLeg(msgspec.Struct, frozen=True):
    """The end of one leg as its HTTP side sees it; exactly one per `LegArrived`.

    `reason` None is success: a prefill leg answers; a decode leg has already been answered by the
    model side.
    """

    key: Key
    reason: Reason | None
    detail: str = ""


class Fence(msgspec.Struct, frozen=True):
    """Destroy the mappings of all ranks through which writes could land.

    Answered by a `TransportLost` and a `TransportReady` of each.
    """

    cause: str
    pages: int


class Report(msgspec.Struct, frozen=True):
    """A fault of our own: the key has been failed and its pages are locked; people must know."""

    key: Key
    reason: Reason
    detail: str
    """With the key's story."""


class Count(msgspec.Struct, frozen=True):
    """Something that is normal input but worth counting: a stale, doubled or unknown message."""

    what: str


class CountBytes(msgspec.Struct, frozen=True):
    """Bytes whose write was confirmed, once per run, and apart from them those written again."""

    kind: str
    """`kv` or `metadata`; `repeat`: the write before this one was lost."""
    nbytes: int


Effect = (
    ResolvePeer
    | Send
    | StartPrefill
    | StartDecode
    | StartAlone
    | StopCompute
    | Write
    | VerifyRun
    | ReadMetadata
    | ClearMetadata
    | ConcludeLeg
    | Fence
    | Report
    | Count
    | CountBytes
)
