"""The unix socket between an engine and its sidecar, and what the sidecar makes of a hello."""

from __future__ import annotations

from fuzz.mutation import Parts
from fuzz.target import Target
from fuzz.wire import KEY, MESSAGES, PEER
from pdcluster_protocol.codec import (
    FrameReader,
    engine_to_sidecar,
    frame,
    sidecar_to_engine,
)
from pdcluster_protocol.errors import PDClusterError, Reason, WireError
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.instance import InstanceNode, InstancePlan
from pdcluster_protocol.layout import KVLayout, Region
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import (
    CancelLeg,
    Drain,
    DumpAnswered,
    DumpRequested,
    EngineHello,
    EngineToSidecar,
    HelloAnswer,
    Inbound,
    InstanceCard,
    Load,
    Outbound,
    PeerChanged,
    PeerState,
    Pulse,
    RankCard,
    Resolve,
    Resolved,
    SidecarToEngine,
)
from pdcluster_protocol.push.registration import registration_of
from pdcluster_protocol.push.registry import RegistryNode
from pdcluster_protocol.sidecar_messages import InstanceDied, Ping
from pdcluster_protocol.topology import Parallelism, RankCoordinate

LAYOUT = KVLayout(64, "bfloat16", (Region(0, "key", 128), Region(0, "value", 128)))
PLAN = InstancePlan(
    cluster="c",
    instance="c-prefill-0",
    role=Role.PREFILL,
    parallel=Parallelism(tp=2, dp=2),
    allocation="Early",
    fingerprint="f",
    http=RankAddress("127.64.0.1", 8998),
    control_port=9000,
    session="s",
)
HELLO = EngineHello(
    instance="c-prefill-0",
    role="prefill",
    coordinate=RankCoordinate(1),
    parallel=PLAN.parallel,
    layout=LAYOUT,
    incarnation="i",
    session="engine",
    http_port=30001,
    fingerprint="f",
    allocation="Early",
    served_name="tiny",
    max_context=4096,
    page_count=64,
    tokenizer_digest="t",
    tokenizer_files={"tokenizer.json": b"{}"},
    rooms=(KEY,),
    pid=7,
)
CARD = InstanceCard(
    "c",
    "c-decode-0",
    "decode",
    "i2",
    "s2",
    RankAddress("127.64.0.2", 8998),
    ranks=(RankCard(RankCoordinate(), PEER, 30000),),
    layout=LAYOUT,
    fingerprint="f",
)
NODE_MESSAGES = tuple(
    message for message in MESSAGES if not isinstance(message, (Ping, InstanceDied))
)
FROM_ENGINE: tuple[EngineToSidecar, ...] = (
    HELLO,
    Resolve("127.64.0.2", 8998),
    Pulse(9, Load(1, 2, 3, 4, 5, 6, 7), 2, draining=True),
    DumpAnswered(1, b'{"rooms": []}'),
    *(Outbound(PEER, message) for message in NODE_MESSAGES),
)
FROM_SIDECAR: tuple[SidecarToEngine, ...] = (
    HelloAnswer("i", PEER),
    Resolved("127.64.0.2", 8998, CARD, trusted=True),
    PeerChanged("i2", PeerState.DEAD, "gone"),
    CancelLeg("rid", KEY, Reason.ABORTED),
    DumpRequested(1),
    Drain(Reason.SHUTTING_DOWN, done=True),
    *(Inbound(message, "i2") for message in NODE_MESSAGES),
)


def check_from_engine(parts: Parts) -> bool:
    """A link's messages are taken or refused, and a table of ranks outlives whatever they say."""
    _cut_anywhere(parts)
    instance, registry = InstanceNode(PLAN, Limits()), RegistryNode()
    taken = False
    for part in parts:
        try:
            message: EngineToSidecar = engine_to_sidecar.decode(part)
        except WireError:
            continue
        taken = True
        assert message == engine_to_sidecar.decode(engine_to_sidecar.encode(message))
        if isinstance(message, EngineHello):
            _greeted(instance, registry, message)
        elif isinstance(message, Pulse):
            instance.pulse(HELLO.coordinate, message, 2.0)
    assert len(instance.members) <= PLAN.parallel.rank_count
    instance.load_report(3.0)
    instance.card(3.0)
    return taken


def check_from_sidecar(parts: Parts) -> bool:
    """The other direction: an engine's reader knows a message or a `WireError`."""
    taken = False
    for part in parts:
        try:
            message: SidecarToEngine = sidecar_to_engine.decode(part)
        except WireError:
            continue
        taken = True
        assert message == sidecar_to_engine.decode(sidecar_to_engine.encode(message))
    return taken


def _greeted(instance: InstanceNode, registry: RegistryNode, hello: EngineHello) -> None:
    answer = instance.join(hello, minted="minted", now=1.0)
    assert sidecar_to_engine.encode(answer)
    if answer.refused:
        return
    registry.begin(answer.incarnation)
    try:
        registry.register(registration_of(hello, answer.address, answer.incarnation))
    except PDClusterError:
        assert 0 == registry.registered


def _cut_anywhere(parts: Parts) -> None:
    """Frames come out whole, also when the stream is cut in the middle of a length."""
    stream = b"".join(map(frame, parts))
    middle = len(stream) * 2 // 3
    reader = FrameReader()
    assert parts == reader.feed(stream[:middle]) + reader.feed(stream[middle:])


TARGETS = (
    Target(
        "link from engine",
        tuple((engine_to_sidecar.encode(message),) for message in FROM_ENGINE),
        check_from_engine,
        weight=2,
    ),
    Target(
        "link from sidecar",
        tuple((sidecar_to_engine.encode(message),) for message in FROM_SIDECAR),
        check_from_sidecar,
    ),
)
