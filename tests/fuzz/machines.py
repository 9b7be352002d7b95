"""A prefill and a decode node among peers that may say anything.

The corpus is what honest nodes of several shapes say to each other, recorded from both sides. Each
part is one message and the rank that it came to (`Said`), a peer's state or a cancel; two legs
arrive at fixed places. After every event all invariants hold and every effect can be carried out;
after the last one, time runs until no clock does, and then nothing may be left.
"""

from __future__ import annotations

from functools import cache

import msgspec

from fuzz.mutation import Parts
from fuzz.stage import INCARNATIONS, Shape, Stage, address
from fuzz.target import Target
from pdcluster_protocol import events as ev
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.messages import (
    Abort,
    CancelLeg,
    Concluded,
    NodeMessage,
    PeerChanged,
    PeerState,
    RegisterKVArgs,
    Status,
)
from pdcluster_protocol.topology import Parallelism
from pdcluster_protocol.undecodable import UNDECODABLE
from support.ledgers import key

FIRST, SECOND = key(11), key(12)
SECOND_AT = 4
"""The second leg comes before this part, so that its metadata may come early."""
SHAPES = (
    Shape(Parallelism(), Parallelism()),
    Shape(Parallelism(tp=2), Parallelism()),
    Shape(Parallelism(), Parallelism(tp=2)),
    Shape(Parallelism(pp=2), Parallelism()),
)


class Said(msgspec.Struct, frozen=True, tag="SAID"):
    """A peer's message, as the sidecar of the rank `rank` hands it over."""

    rank: int
    incarnation: str
    message: NodeMessage


class Shaped(msgspec.Struct, frozen=True, tag="SHAPED"):
    """First part: which of `SHAPES` the node has."""

    shape: int


Step = Said | Shaped | PeerChanged | CancelLeg
_decoder: msgspec.msgpack.Decoder[Step] = msgspec.msgpack.Decoder(Step)


def check_prefill(parts: Parts) -> bool:
    """Whatever decode peers say, a prefill node keeps its invariants and comes to rest."""
    return _played(Role.PREFILL, parts)


def check_decode(parts: Parts) -> bool:
    """Whatever prefill peers say, a decode node keeps its invariants and comes to rest."""
    return _played(Role.DECODE, parts)


def _played(role: Role, parts: Parts) -> bool:
    steps = [_step(part) for part in parts]
    shape = steps[0].shape if steps and isinstance(steps[0], Shaped) else 0
    stage = Stage(role, SHAPES[shape % len(SHAPES)])
    stage.leg(FIRST)
    for index, step in enumerate(steps):
        if index == SECOND_AT:
            stage.leg(SECOND)
        stage.now += 0.05
        _take(stage, step)
    assert msgspec.json.encode(stage.node.dump(), enc_hook=str)
    stage.run_down()
    assert FIRST in stage.ended
    final = (Status, Concluded)
    return any(isinstance(send.message, final) and send.message.status == 4 for send in stage.sent)


def _step(part: bytes) -> Step | None:
    try:
        return _decoder.decode(part)
    except UNDECODABLE:
        return None


def _take(stage: Stage, step: Step | None) -> None:
    match step:
        case Said(rank, incarnation, message):
            # A sidecar knows at which of its own ranks a message came.
            stage.hear(message, incarnation, rank % len(stage.node.ledger.setup.ranks))
        case PeerChanged(incarnation, state, detail):
            stage.give(ev.PeerStateChanged(incarnation, state, detail))
        case CancelLeg(_, cancelled, reason) if cancelled is not None:
            stage.give(ev.LegCancelled(cancelled, reason))
        case _:
            pass


# --- what honest peers say ----------------------------------------------------------------------

Conversation = dict[Role, list[Said]]
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@cache
def conversation(shape: Shape) -> Conversation:
    """All that both sides hear of one another for two requests, until both are answered."""
    stages = {role: Stage(role, shape) for role in Role}
    heard: Conversation = {role: [] for role in Role}
    for leg in (FIRST, SECOND):
        for stage in stages.values():
            stage.leg(leg)
        _exchange(stages, heard)
    assert all([FIRST, SECOND] == stage.ended for stage in stages.values())
    return heard


def _exchange(stages: dict[Role, Stage], heard: Conversation) -> None:
    spoken = dict.fromkeys(stages, 0)
    while any(spoken[role] < len(stage.sent) for role, stage in stages.items()):
        for role, stage in stages.items():
            for send in stage.sent[spoken[role] :]:
                spoken[role] += 1
                other = OTHER[role]
                rank = send.to.port - address(other, 0).port
                heard[other].append(Said(rank, INCARNATIONS[role], send.message))
                stages[other].hear(send.message, INCARNATIONS[role], rank)


def registrations() -> list[RegisterKVArgs]:
    """What decode ranks of the simplest shape say of their memory."""
    said = [said.message for said in conversation(SHAPES[0])[Role.PREFILL]]
    return [message for message in said if isinstance(message, RegisterKVArgs)]


def encoded(*steps: Step) -> tuple[bytes, ...]:
    return tuple(map(msgspec.msgpack.encode, steps))


def _corpus(role: Role) -> tuple[tuple[bytes, ...], ...]:
    peer = INCARNATIONS[OTHER[role]]
    back = address(OTHER[role], 0)
    found = []
    for number, shape in enumerate(SHAPES):
        heard = conversation(shape)[role]
        first: list[Step] = [Shaped(number), *_about(heard, FIRST)]
        died = PeerChanged(peer, PeerState.DEAD, "gone")
        failed = Status(FIRST, 0, 0, drained=False, reason="Stalled", reply_to=back)
        found += [
            encoded(*first),
            encoded(Shaped(number), *heard),
            encoded(*first[:4], died),
            encoded(*first[:4], CancelLeg("", FIRST, Reason.ABORTED), *first[4:]),
            encoded(*first[:3], Said(0, peer, Abort(FIRST, back, 1)), *first[3:]),
            encoded(*first[:3], Said(0, peer, failed), *first[3:]),
        ]
    return tuple(found)


def _about(heard: list[Said], leg: Key) -> list[Said]:
    return [said for said in heard if getattr(said.message, "key", leg) == leg]


TARGETS = (
    Target("prefill node", _corpus(Role.PREFILL), check_prefill),
    Target("decode node", _corpus(Role.DECODE), check_decode),
)
