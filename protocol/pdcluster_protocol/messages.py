"""What our processes say to each other: node to node, engine to its sidecar, sidecar to sidecar.

Three families, each a tagged union:
- `NodeMessage`: from one rank's node to another's. They travel engine → link → sidecar → ZMQ →
  sidecar → link → engine. Those that SGLang knows are put into its frames by `push.frames`; what we
  add (key, incarnation, our extra fields, MAC) rides in two trailing frames.
- `LinkMessage`: over the unix socket between an engine and its own sidecar.
- `SidecarMessage`: between two sidecars on the control channel (`sidecar_messages`).

Page lists are raw little-endian int32 bytes as in SGLang's frames: 16,384 are read in 80 µs.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.rank_mapping import RowSpread
from pdcluster_protocol.topology import Parallelism, RankCoordinate

WIRE_VERSION_MIN = 1
WIRE_VERSION_MAX = 1


class KVPoll(IntEnum):
    """SGLang's five wire values (specified in its `KVPoll`)."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class PeerState(StrEnum):
    """What is known of a peer instance; only `DEAD` ends rooms."""

    ALIVE = "alive"
    UNKNOWN = "unknown"
    DEAD = "dead"


# --- node to node -------------------------------------------------------------------------------


class RegisterKVArgs(msgspec.Struct, frozen=True, tag="PD_KVARGS"):
    """Decode → prefill: where a decode rank's memory lies (SGLang's 20 frames)."""

    reply_to: RankAddress
    session: str
    """The transport's name of the target, `host:port`."""
    kv_pointers: tuple[int, ...]
    """Base addresses of the non-indexer regions, in layout order."""
    aux_pointers: tuple[int, ...]
    """Base addresses of the metadata buffers, in SGLang's order."""
    kv_item_lengths: tuple[int, ...]
    """Bytes of one page, parallel to `kv_pointers`."""
    state_pointers: tuple[tuple[int, ...], ...] = ()
    """One inner tuple per state component; ours is the indexer's regions."""
    state_item_lengths: tuple[tuple[int, ...], ...] = ()
    kv_layer_ids: tuple[int, ...] = ()
    state_layer_ids: tuple[tuple[int, ...], ...] = ()
    decode_tp_rank: int = 0
    decode_tp_size: int = 1
    dcp_size: int = 1
    dcp_rank: int = 0
    # ours, in the trailer
    decode_pp_rank: int = 0
    decode_pp_size: int = 1
    layout_digest: str = ""
    """Of this rank's own regions."""
    page_count: int = 0
    slot_count: int = 0
    slot_bytes: int = 0
    """From a metadata slot to the next, whose rows lie side by side; 0: in each buffer its row."""
    mapping: int = 0
    """Counts how often decode's memory was mapped: a registration of an earlier one is stale."""


class TransferMetadata(msgspec.Struct, frozen=True, tag="PD_METADATA"):
    """Decode → prefill: the pages are reserved and locked, these are their numbers."""

    key: Key
    reply_to: RankAddress
    session: str
    pages: bytes
    """int32 little-endian page numbers of tokens [prefix, prompt)."""
    aux_index: int | None
    required_destinations: int = 1
    prefix_tokens: int = 0
    state_indices: tuple[tuple[int, ...], ...] = ()
    dummy: bool = False
    # ours, in the trailer
    prompt_tokens: int = 0
    prompt_digest: str = ""
    epoch: int = 0
    """Counts reservations of decode's pool: a run of an earlier epoch is stale."""
    mapping: int = 0
    """The registration that these page numbers belong to."""


class Bootstrap(msgspec.Struct, frozen=True, tag="PD_BOOTSTRAP"):
    """Decode → prefill under `prefill_complete`: the destination exists, pages come later."""

    key: Key
    reply_to: RankAddress


class Abort(msgspec.Struct, frozen=True, tag="PD_ABORT"):
    """Decode → prefill: stop writing for this key and say when writing has stopped."""

    key: Key
    reply_to: RankAddress
    generation: int | None = None
    """SGLang's per-process count of cancels; ours always sends one."""


class AbortAck(msgspec.Struct, frozen=True, tag="PD_ABORT_ACK"):
    """Prefill → decode: no write of this key is queued or under way any more."""

    key: Key
    rank: int
    generation: int | None = None
    # ours, in the trailer
    drained: bool = True
    """False: a write ended without proof that it stopped; decode must fence."""


class Accepted(msgspec.Struct, frozen=True, tag="PD_ACCEPTED"):
    """Prefill → decode: metadata has arrived; left out where runs or a status say so in time."""

    key: Key
    rank: int


class Run(msgspec.Struct, frozen=True, array_like=True):
    """One write of consecutive rows that has landed: decode must verify it before it may read."""

    index: int
    """Dense from 0 per key and rank: doubles are found by it."""
    region: int
    """Index into the layout's regions; from `len(regions)` on, a metadata buffer."""
    first_page: int
    """Decode's page number (for a metadata buffer, the slot)."""
    pages: int
    nbytes: int
    """Valid bytes: the last page of a prompt may be partly filled."""
    digest: int
    """xxh3_64 of the bytes; 0 where checksums are off."""
    offset: int = 0
    """Where the part that was written begins in each row."""
    width: int = 0
    """Bytes of each row that were written; 0: whole rows."""


class RunsLanded(msgspec.Struct, frozen=True, tag="PD_RUNS"):
    """Prefill → decode: these runs are written completely."""

    key: Key
    rank: int
    epoch: int
    runs: tuple[Run, ...]


class Status(msgspec.Struct, frozen=True, tag="PD_STATUS"):
    """Prefill → decode: KVPoll of one prefill rank for one key (SGLang's three frames)."""

    key: Key
    status: int
    rank: int
    # ours, in the trailer
    runs: int = 0
    """With `SUCCESS`: how many this rank has announced in all, the last ones maybe in `landed`."""
    landed: tuple[Run, ...] = ()
    epoch: int = 0
    drained: bool = True
    """False: an earlier write of this key ended without proof; decode must fence before re-use."""
    prompt_tokens: int = 0
    prompt_digest: str = ""
    reason: str = ""
    detail: str = ""
    reply_to: RankAddress | None = None
    """Where `Concluded` is to be sent; a plain SGLang peer names none and expects none."""


class Concluded(msgspec.Struct, frozen=True, tag="PD_CONCLUDED"):
    """Decode → prefill: the final status has been taken; stop repeating it."""

    key: Key
    status: int
    reason: str = ""


class AuxData(msgspec.Struct, frozen=True, tag="PD_AUX"):
    """Prefill → decode: one metadata buffer row over TCP (SGLang's fall-back)."""

    key: Key
    buffer: int
    slot: int
    row: bytes


NodeMessage = (
    RegisterKVArgs
    | TransferMetadata
    | Bootstrap
    | Abort
    | AbortAck
    | Accepted
    | RunsLanded
    | Status
    | Concluded
    | AuxData
)


# --- instances ----------------------------------------------------------------------------------


class RankCard(msgspec.Struct, frozen=True):
    """One rank of an instance and where it can be reached."""

    coordinate: RankCoordinate
    address: RankAddress
    """Control channel (ZMQ PULL)."""
    http_port: int
    """The engine's HTTP port of this rank's DP rank, on the same host."""
    session: str = ""
    """Of the sidecar of its pod; empty: that of the card."""


class Load(msgspec.Struct, frozen=True):
    """What a rank can still take; the router's choice is made on it."""

    pages_free: int = 0
    pages_total: int = 0
    pages_quarantined: int = 0
    rooms_open: int = 0
    queued: int = 0
    running: int = 0
    sequences_max: int = 0


class InstanceCard(msgspec.Struct, frozen=True):
    """Body and answer of `POST /pd/v1/hello`: who I am, mutual and signed.

    A router sends its own card with role `router`, no ranks and no layout.
    """

    cluster: str
    instance: str
    role: str
    incarnation: str
    """Empty for a router, and while no rank has said hello."""
    session: str
    """Of the process that speaks: MAC counters are kept per session."""
    http: RankAddress
    """The sidecar's own HTTP address."""
    wire_min: int = WIRE_VERSION_MIN
    wire_max: int = WIRE_VERSION_MAX
    ranks: tuple[RankCard, ...] = ()
    parallel: Parallelism = Parallelism()
    layout: KVLayout | None = None
    """The whole model's; what a rank holds of it follows from its place."""
    spread: RowSpread = RowSpread.FIRST_CP_RANK
    allocation: str = "Early"
    fingerprint: str = ""
    served_name: str = ""
    max_context: int = 0
    ready: bool = False
    """Its ranks are linked and move."""
    draining: bool = False
    """It goes on with what it has begun and takes nothing new."""


# --- engine and its own sidecar -----------------------------------------------------------------


class EngineHello(msgspec.Struct, frozen=True, tag="PD_HELLO"):
    """Engine → sidecar, first message on every connection of a rank."""

    instance: str
    role: str
    coordinate: RankCoordinate
    parallel: Parallelism
    layout: KVLayout
    """The whole model's, whichever rank says it."""
    incarnation: str
    """Empty on the first connection; the sidecar of pod 0 mints it."""
    session: str
    http_port: int
    fingerprint: str
    allocation: str
    served_name: str
    max_context: int
    page_count: int
    tokenizer_digest: str
    tokenizer_files: dict[str, bytes]
    """`tokenizer.json` and `tokenizer_config.json`, for routers."""
    rooms: tuple[Key, ...] = ()
    """The open rooms, so that the log of a restarted sidecar says what it came back to."""
    pid: int = 0
    spread: RowSpread = RowSpread.FIRST_CP_RANK


class HelloAnswer(msgspec.Struct, frozen=True, tag="PD_HELLO_ANSWER"):
    """Sidecar → engine: the instance's incarnation and this rank's control address."""

    incarnation: str
    address: RankAddress
    refused: str = ""
    """Not empty: why this rank may not join; the engine exits with it."""


class Resolve(msgspec.Struct, frozen=True, tag="PD_RESOLVE"):
    """Engine → sidecar: who is the prefill instance at this bootstrap address?"""

    host: str
    port: int


class Resolved(msgspec.Struct, frozen=True, tag="PD_RESOLVED"):
    """Sidecar → engine: its card, or the reason why not."""

    host: str
    port: int
    card: InstanceCard | None
    trusted: bool = False
    reason: str = ""
    detail: str = ""


class Outbound(msgspec.Struct, frozen=True, tag="PD_OUT"):
    """Engine → sidecar: send this to that rank."""

    to: RankAddress
    message: NodeMessage


class Inbound(msgspec.Struct, frozen=True, tag="PD_IN"):
    """Sidecar → engine: this came, checked; `incarnation` is the sender's instance."""

    message: NodeMessage
    incarnation: str
    """Empty for a plain SGLang peer."""


class PeerChanged(msgspec.Struct, frozen=True, tag="PD_PEER"):
    """Sidecar → engine: the state of a peer instance changed."""

    incarnation: str
    state: PeerState
    detail: str = ""


class CancelLeg(msgspec.Struct, frozen=True, tag="PD_CANCEL"):
    """Sidecar → engine: end one leg, by exact rid or exact key; nothing else matches."""

    rid: str
    key: Key | None
    reason: Reason


class Pulse(msgspec.Struct, frozen=True, tag="PD_PULSE"):
    """Engine → sidecar, twice a second and when a drain goes on: loop counter and load."""

    loops: int
    load: Load
    rooms: int = 0
    draining: bool = False


class DumpRequested(msgspec.Struct, frozen=True, tag="PD_DUMP"):
    """Sidecar → engine: describe rooms, ranks and pages."""

    request: int


class DumpAnswered(msgspec.Struct, frozen=True, tag="PD_DUMPED"):
    """Engine → sidecar: the description as JSON."""

    request: int
    json: bytes


class Drain(msgspec.Struct, frozen=True, tag="PD_DRAIN"):
    """Sidecar → engine: take nothing new, since a rank of the instance drains."""

    reason: Reason
    done: bool = False
    """No rank has a room left: who was asked to stop ends no other's rooms by it."""


EngineToSidecar = EngineHello | Resolve | Outbound | Pulse | DumpAnswered
SidecarToEngine = HelloAnswer | Resolved | Inbound | PeerChanged | CancelLeg | DumpRequested | Drain
