"""A prefill and a decode node among peers that may say anything.

The node's own surroundings are honest: an executor answers every effect at once and as asked. Each
part is one message over the link (`Inbound`, a peer's state, a cancel); two legs arrive at fixed
places. After every event all invariants hold and every effect can be carried out; after the last
one, time runs until no clock does, and then nothing may be left.
"""

from __future__ import annotations

from collections import deque

import msgspec

from fuzz.mutation import Parts
from fuzz.target import Target
from pdcluster_engine.transport.port import WriteRequest
from pdcluster_engine.transport.requests import refusal
from pdcluster_protocol import effects as fx
from pdcluster_protocol import events as ev
from pdcluster_protocol import invariants
from pdcluster_protocol.codec import engine_to_sidecar, sidecar_to_engine
from pdcluster_protocol.errors import Reason, WireError
from pdcluster_protocol.ids import Key, RankAddress, Role
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.messages import (
    Abort,
    AbortAck,
    Accepted,
    CancelLeg,
    Concluded,
    Inbound,
    InstanceCard,
    NodeMessage,
    Outbound,
    PeerChanged,
    PeerState,
    RankCard,
    RegisterKVArgs,
    Resolve,
    Run,
    RunsLanded,
    SidecarToEngine,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.nodes import Node, decode_node, prefill_node
from pdcluster_protocol.push.destinations import register_kv_args
from pdcluster_protocol.push.frames import encode
from pdcluster_protocol.topology import RankCoordinate
from support.ledgers import BUFFERS, HERE, LAYOUT, PEER, key, node_setup

FIRST, SECOND = key(11), key(12)
SECOND_AT = 3
"""The second leg comes before this part, so that its metadata may come early."""
PROMPT_TOKENS, OUTPUT_TOKENS = 10, 6
DIGEST = 7
INCARNATION = "peer"
BOOTSTRAP = RankAddress("127.64.0.2", 8998)
LIMITS = Limits(
    rooms_max=4, waiting_rooms_max=3, tombstones_max=8, peers_max=3, stories_max=8, run_bytes_max=64
)
TIMEOUTS = Timeouts(
    bootstrap_seconds=20.0, stall_seconds=5.0, transfer_seconds=40.0, abort_seconds=2.0
)
TICKS_MAX = 3000
SECONDS_MAX = 900.0
CARD = InstanceCard(
    "c",
    "c-prefill-0",
    "prefill",
    INCARNATION,
    "s",
    BOOTSTRAP,
    ranks=(RankCard(RankCoordinate(), PEER, 30000),),
    layout=LAYOUT,
    ready=True,
)


class Stage:
    """One node with honest surroundings."""

    def __init__(self, role: Role) -> None:
        setup = node_setup(limits=LIMITS, timeouts=TIMEOUTS)
        self.node: Node = (prefill_node if role is Role.PREFILL else decode_node)(setup)
        self.now = 1.0
        self.sent: list[tuple[RankAddress, NodeMessage]] = []
        self.ended: list[Key] = []
        self._session = 0
        self.give(ev.Joined("ours", HERE))
        self._renew()

    def leg(self, leg_key: Key) -> None:
        bootstrap = BOOTSTRAP
        digest = "digest"
        self.give(ev.LegArrived(leg_key, "rid", PROMPT_TOKENS, digest, OUTPUT_TOKENS, bootstrap))

    def give(self, event: ev.Event) -> None:
        """One event and all that follows at once."""
        waiting = deque([event])
        while waiting:
            for effect in self.node.handle(waiting.popleft(), self.now):
                waiting.extend(self._carried_out(effect))
            invariants.check(self.node)

    def run_down(self) -> None:
        """Let time pass until nothing waits."""
        for _ in range(TICKS_MAX):
            deadline = self.node.deadline()
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            self.give(ev.Tick())
        assert self.node.deadline() is None, f"after {TICKS_MAX} ticks something still waits"
        assert self.now < SECONDS_MAX, f"something waited until {self.now} s"
        invariants.check_idle(self.node)

    def _carried_out(self, effect: fx.Effect) -> list[ev.Event]:
        match effect:
            case fx.Send(to, message):
                self._send(to, message)
            case fx.ResolvePeer(bootstrap):
                assert engine_to_sidecar.encode(Resolve(bootstrap.host, bootstrap.port))
                return [ev.PeerResolved(bootstrap, CARD)]
            case fx.Write():
                return [self._write(effect)]
            case fx.VerifyRun(operation, offset, nbytes):
                assert 0 <= offset
                assert 0 < nbytes
                return [ev.OperationDone(operation, ok=True, digest=DIGEST)]
            case fx.Fence():
                return [ev.TransportLost("fenced"), self._ready()]
            case fx.ConcludeLeg(leg_key):
                assert leg_key not in self.ended, f"{leg_key} ended twice"
                self.ended.append(leg_key)
            case _:
                return self._computed(effect)
        return []

    def _computed(self, effect: fx.Effect) -> list[ev.Event]:
        match effect:
            case fx.StartPrefill(done):
                rows = [
                    ev.RowsWritten(done, region, 0, PROMPT_TOKENS)
                    for region in range(len(LAYOUT.regions))
                ]
                return [*rows, ev.PromptComputed(done)]
            case fx.StartDecode(done) | fx.StartAlone(done):
                return [ev.DecodeFinished(done)]
            case fx.StopCompute(done):
                return [ev.ComputeStopped(done)]
            case fx.ReadMetadata(done):
                return [ev.MetadataRead(done, done.room)]
            case _:
                return []

    def _send(self, to: RankAddress, message: NodeMessage) -> None:
        """What a node says can always be put on the link, and into frames or refused by name."""
        assert engine_to_sidecar.encode(Outbound(to, message))
        try:
            encode(message)
        except WireError:
            return
        self.sent.append((to, message))

    def _write(self, write: fx.Write) -> ev.OperationDone:
        """A write's address is a peer's, so it may be refused, and else can be sent on."""
        request = WriteRequest(
            write.operation,
            write.target,
            write.source_offset,
            write.destination_address,
            write.nbytes,
            digest=True,
        )
        refused = refusal(request)
        if refused is not None:
            return ev.OperationDone(write.operation, ok=False, detail=refused.detail)
        assert msgspec.msgpack.encode(request)
        return ev.OperationDone(write.operation, ok=True, digest=DIGEST)

    def _ready(self) -> ev.TransportReady:
        self._session += 1
        return ev.TransportReady(f"127.64.0.1:{15000 + self._session}", self._session << 32)

    def _renew(self) -> None:
        self.give(self._ready())


def check_prefill(parts: Parts) -> bool:
    """Whatever decode peers say, a prefill node keeps its invariants and comes to rest."""
    return _played(Role.PREFILL, parts)


def check_decode(parts: Parts) -> bool:
    """Whatever prefill peers say, a decode node keeps its invariants and comes to rest."""
    return _played(Role.DECODE, parts)


def _played(role: Role, parts: Parts) -> bool:
    stage = Stage(role)
    stage.leg(FIRST)
    for index, part in enumerate(parts):
        if index == SECOND_AT:
            stage.leg(SECOND)
        stage.now += 0.05
        event = _event(part)
        if event is not None:
            stage.give(event)
    assert msgspec.json.encode(stage.node.dump(), enc_hook=str)
    stage.run_down()
    assert FIRST in stage.ended
    return any(isinstance(message, Accepted | Concluded) for _, message in stage.sent)


def _event(part: bytes) -> ev.Event | None:
    try:
        message: SidecarToEngine = sidecar_to_engine.decode(part)
    except WireError:
        return None
    match message:
        case Inbound(inner, incarnation):
            return ev.MessageArrived(inner, incarnation)
        case PeerChanged(incarnation, state, detail):
            return ev.PeerStateChanged(incarnation, state, detail)
        case CancelLeg(_, cancelled, reason) if cancelled is not None:
            return ev.LegCancelled(cancelled, reason)
        case _:
            return None


# --- what honest peers say ----------------------------------------------------------------------

REGISTRATION = register_kv_args(
    LAYOUT,
    base_address=1 << 40,
    page_count=16,
    slot_count=4,
    metadata_buffers=BUFFERS,
    template=RegisterKVArgs(PEER, "127.64.0.2:15001", (), (), (), mapping=1),
)
PAGES = b"\5\0\0\0\6\0\0\0\3\0\0\0"


def _metadata(leg_key: Key) -> TransferMetadata:
    return TransferMetadata(
        leg_key,
        PEER,
        "127.64.0.2:15001",
        PAGES,
        1,
        prompt_tokens=PROMPT_TOKENS,
        prompt_digest="digest",
        epoch=3,
        mapping=1,
    )


def _from_prefill(leg_key: Key, published: TransferMetadata) -> list[NodeMessage]:
    """What a prefill rank says when all has landed where `published` told it to write."""
    numbers = memoryview(published.pages).cast("i")
    assert published.aux_index is not None
    runs = [
        Run(index, region, page, 1, rows * described.bytes_per_token, DIGEST)
        for index, (region, described, page, rows) in enumerate(
            (region, described, page, min(4, PROMPT_TOKENS - 4 * position))
            for region, described in enumerate(LAYOUT.regions)
            for position, page in enumerate(numbers)
        )
    ]
    for buffer, (_, nbytes) in enumerate(BUFFERS):
        slot = published.aux_index
        runs.append(Run(len(runs), len(LAYOUT.regions) + buffer, slot, 1, nbytes, DIGEST))
    return [
        Accepted(leg_key, 0),
        RunsLanded(leg_key, 0, published.epoch, tuple(runs[:4])),
        RunsLanded(leg_key, 0, published.epoch, tuple(runs[4:])),
        Status(
            leg_key,
            4,
            0,
            len(runs),
            prompt_tokens=PROMPT_TOKENS,
            prompt_digest="digest",
            reply_to=PEER,
        ),
    ]


def _published() -> list[TransferMetadata]:
    """Where a decode node reserves for both legs."""
    stage = Stage(Role.DECODE)
    stage.leg(FIRST)
    stage.leg(SECOND)
    return [message for _, message in stage.sent if isinstance(message, TransferMetadata)]


def _parts(messages: list[NodeMessage], *others: SidecarToEngine) -> tuple[bytes, ...]:
    inbound = [Inbound(message, INCARNATION) for message in messages]
    return tuple(sidecar_to_engine.encode(message) for message in (*inbound, *others))


def _prefill_corpus() -> tuple[tuple[bytes, ...], ...]:
    first, second = _metadata(FIRST), _metadata(SECOND)
    return (
        _parts([REGISTRATION, first, Concluded(FIRST, 4)]),
        _parts([REGISTRATION, second, first, Concluded(FIRST, 4), Concluded(SECOND, 4)]),
        _parts([REGISTRATION, first, Abort(FIRST, PEER, 1), Abort(SECOND, PEER, 2)]),
        _parts([REGISTRATION, first], PeerChanged(INCARNATION, PeerState.DEAD, "gone")),
        _parts([REGISTRATION, first], CancelLeg("", FIRST, Reason.ABORTED)),
    )


def _decode_corpus() -> tuple[tuple[bytes, ...], ...]:
    first, second = _published()
    said = _from_prefill(FIRST, first)
    failed = Status(FIRST, 0, 0, drained=False, reason="Stalled", reply_to=PEER)
    return (
        _parts(said),
        _parts([*said, *_from_prefill(SECOND, second)]),
        _parts([*said[:2], failed, AbortAck(FIRST, 0, 1)]),
        _parts([*said[:1], AbortAck(FIRST, 0, 1)], CancelLeg("", FIRST, Reason.ABORTED)),
        _parts(said[:2], PeerChanged(INCARNATION, PeerState.DEAD, "gone")),
    )


TARGETS = (
    Target("prefill node", _prefill_corpus(), check_prefill),
    Target("decode node", _decode_corpus(), check_decode),
)
