"""One node among honest surroundings: every effect is carried out at once, and checked."""

from __future__ import annotations

from collections import deque

import msgspec

from pdcluster_engine.transport.port import DigestRequest, Request, WriteRequest
from pdcluster_engine.transport.requests import Outstanding, refusal
from pdcluster_protocol import effects as fx
from pdcluster_protocol import events as ev
from pdcluster_protocol import invariants
from pdcluster_protocol.authentication import FrameSigner, KeyRing
from pdcluster_protocol.codec import engine_to_sidecar
from pdcluster_protocol.errors import TransportError
from pdcluster_protocol.ids import Key, RankAddress, Role
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.ledger import NodeSetup
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.messages import InstanceCard, NodeMessage, Outbound, RankCard, Resolve
from pdcluster_protocol.nodes import Node, decode_node, prefill_node
from pdcluster_protocol.push.frames import seal
from pdcluster_protocol.topology import Parallelism
from support.rank_places import rank_places

LAYOUT = KVLayout(
    4,
    "float32",
    (
        Region(0, "key", 8, 2),
        Region(0, "value", 8, 2),
        Region(1, "key", 8, 2),
        Region(1, "value", 8, 2),
    ),
)
METADATA_ROWS = (16, 8)
PAGE_COUNT, SLOT_COUNT = 16, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 10, 6
TOKENS_DIGEST = "digest"
BYTES_DIGEST = 7
HOSTS = {Role.PREFILL: "127.64.0.2", Role.DECODE: "127.64.0.1"}
INCARNATIONS = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
BOOTSTRAP = RankAddress(HOSTS[Role.PREFILL], 8998)
RING = KeyRing({"k1": b"k" * 32})
LIMITS = Limits(
    rooms_max=4, waiting_rooms_max=3, tombstones_max=8, peers_max=3, stories_max=8, run_bytes_max=64
)
TIMEOUTS = Timeouts(
    bootstrap_seconds=20.0, stall_seconds=5.0, transfer_seconds=40.0, abort_seconds=2.0
)
ARENA_NBYTES = 1 << 20
TICKS_MAX = 3000
SECONDS_MAX = 900.0


class Shape(msgspec.Struct, frozen=True):
    """The sizes of two replicas that may meet."""

    prefill: Parallelism
    decode: Parallelism

    def card(self) -> InstanceCard:
        """The prefill instance, as decode's sidecar tells of it."""
        places = _setup(self.prefill).ranks
        return InstanceCard(
            "c",
            "c-prefill-0",
            "prefill",
            INCARNATIONS[Role.PREFILL],
            "s",
            BOOTSTRAP,
            ranks=tuple(
                RankCard(place.coordinate, address(Role.PREFILL, rank), 30000)
                for rank, place in enumerate(places)
            ),
            parallel=self.prefill,
            layout=LAYOUT,
            ready=True,
        )


def address(role: Role, rank: int) -> RankAddress:
    """Where a rank is reached."""
    return RankAddress(HOSTS[role], 9000 + rank)


def _setup(parallel: Parallelism) -> NodeSetup:
    return NodeSetup(
        layout=LAYOUT,
        page_count=PAGE_COUNT,
        slot_count=SLOT_COUNT,
        parallel=parallel,
        ranks=rank_places(
            LAYOUT,
            parallel,
            dp_rank=0,
            page_count=PAGE_COUNT,
            metadata_rows=METADATA_ROWS,
        ),
        timeouts=TIMEOUTS,
        limits=LIMITS,
    )


class Stage:
    """The node of one role in one shape."""

    def __init__(self, role: Role, shape: Shape) -> None:
        setup = _setup(shape.prefill if role is Role.PREFILL else shape.decode)
        self.role = role
        self.node: Node = (prefill_node if role is Role.PREFILL else decode_node)(setup)
        self.now = 1.0
        self.sent: list[fx.Send] = []
        """What was said, in order; whoever plays the peer takes it from here."""
        self.ended: list[Key] = []
        self._card = shape.card()
        self._signer = FrameSigner(RING, "sidecar")
        self._sessions = 0
        for rank in range(len(setup.ranks)):
            self.give(ev.Joined(INCARNATIONS[role], address(role, rank), rank))
        for ready in self._new_sessions():
            self.give(ready)

    def leg(self, key: Key) -> None:
        """A leg of an honest router."""
        self.give(ev.LegArrived(key, "rid", PROMPT_TOKENS, TOKENS_DIGEST, OUTPUT_TOKENS, BOOTSTRAP))

    def hear(self, message: NodeMessage, incarnation: str, rank: int) -> None:
        """A message of a peer."""
        self.give(ev.MessageArrived(message, incarnation, rank))

    def give(self, event: ev.Event) -> None:
        """One event and all that follows at once."""
        waiting = deque([event])
        while waiting:
            for effect in self.node.handle(waiting.popleft(), self.now):
                waiting.extend(self._carried_out(effect))
            invariants.check(self.node)

    def run_down(self) -> None:
        """Let time pass until nothing waits; then nothing may be left."""
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
            case fx.Send():
                self._say(effect)
            case fx.ResolvePeer(bootstrap):
                assert engine_to_sidecar.encode(Resolve(bootstrap.host, bootstrap.port))
                return [ev.PeerResolved(bootstrap, self._card)]
            case fx.Write() | fx.VerifyRun():
                return [self._moved(effect)]
            case fx.Fence():
                lost: list[ev.Event] = [
                    ev.TransportLost("fenced", rank)
                    for rank in range(len(self.node.ledger.setup.ranks))
                ]
                return lost + self._new_sessions()
            case fx.ConcludeLeg(key):
                assert key not in self.ended, f"{key} ended twice"
                self.ended.append(key)
            case _:
                return _computed(effect)
        return []

    def _say(self, send: fx.Send) -> None:
        """What a node says can always be put on the link, and from there into frames."""
        assert engine_to_sidecar.encode(Outbound(send.to, send.message))
        assert seal(send.message, signer=self._signer, receiver="r", incarnation="i")
        self.sent.append(send)

    def _moved(self, effect: fx.Write | fx.VerifyRun) -> ev.OperationDone:
        """The bytes lie in our arena; a write's address is a peer's, so it may be refused."""
        request = _request(effect)
        refused = refusal(request)
        if refused is not None:
            return ev.OperationDone(effect.operation, ok=False, detail=refused.detail)
        try:
            Outstanding(ARENA_NBYTES, operations_max=1).add(request)
        except TransportError as error:
            raise AssertionError(f"the node's own fault: {error}") from error
        assert msgspec.msgpack.encode(request)
        return ev.OperationDone(effect.operation, ok=True, digest=BYTES_DIGEST)

    def _new_sessions(self) -> list[ev.Event]:
        self._sessions += 1
        host = HOSTS[self.role]
        return [
            ev.TransportReady(f"{host}:{15000 + rank}", (self._sessions * 16 + rank) << 32, rank)
            for rank in range(len(self.node.ledger.setup.ranks))
        ]


def _request(effect: fx.Write | fx.VerifyRun) -> Request:
    if isinstance(effect, fx.VerifyRun):
        return DigestRequest(
            effect.operation, effect.offset, effect.nbytes, effect.pieces, effect.stride
        )
    return WriteRequest(
        effect.operation,
        effect.target,
        effect.source_offset,
        effect.destination_address,
        effect.nbytes,
        True,
        effect.pieces,
        effect.source_stride,
        effect.destination_stride,
    )


def _computed(effect: fx.Effect) -> list[ev.Event]:
    match effect:
        case fx.StartPrefill(key):
            rows = [
                ev.RowsWritten(key, region, 0, PROMPT_TOKENS)
                for region in range(len(LAYOUT.regions))
            ]
            return [*rows, ev.PromptComputed(key)]
        case fx.StartDecode(key) | fx.StartAlone(key):
            return [ev.DecodeFinished(key)]
        case fx.StopCompute(key):
            return [ev.ComputeStopped(key)]
        case fx.ReadMetadata(key):
            return [ev.MetadataRead(key, key.room)]
        case _:
            return []
