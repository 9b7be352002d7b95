"""What comes over HTTP: registry bodies, our own control bodies, signatures."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec

from fuzz.link import CARD, HELLO, PLAN
from fuzz.mutation import Parts
from fuzz.target import Target, one_part
from fuzz.wire import KEY, PEER
from pdcluster_protocol.authentication import HttpSigner, HttpVerifier, KeyRing
from pdcluster_protocol.control_api import (
    AbortRequest,
    Dump,
    LoadReport,
    Orders,
    OrdersAsked,
    PeersKnown,
    PodAnswer,
    PodCard,
    PodReport,
    decode_body,
    decode_pod_body,
)
from pdcluster_protocol.errors import RemoteProtocolError, Unauthorized, WireError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.instance import InstanceNode, pairing_refusal
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import HelloAnswer, InstanceCard, Load, Pulse
from pdcluster_protocol.push.registry import RegistryNode
from pdcluster_protocol.sidecar_messages import InstanceDied
from pdcluster_sidecar.peers import PeerTable
from pdcluster_sidecar.router.canary import CanaryRequest
from pdcluster_sidecar.router.tokens import TokenizerAnswer
from support.plain_ranks import plain_row

ROW = plain_row(
    attn_tp_size=2,
    attn_tp_rank=1,
    rank_ip="127.64.0.2",
    load_balance_method="follow_bootstrap_room",
    prefill_http_port=30000,
    kv_layout=None,
    decode_allocation_policy="early",
)
QUERY = b"prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0"
SENTINEL = b"prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
ROOMS_MAX = 8


def check_registry(parts: Parts) -> bool:
    """Four paths, each answered with a code of SGLang's contract; tables keep their bounds."""
    registry = RegistryNode(rooms_max=ROOMS_MAX)
    statuses = []
    for index, part in enumerate(parts):
        match index % 4:
            case 0:
                statuses.append(registry.put_route(part).status)
            case 1:
                statuses.append(registry.register_dp_rank(part, float(index)).status)
            case 2:
                statuses.append(registry.query_dp_ranks(part, float(index)).status)
            case _:
                query = dict(parse_qsl(part.decode("latin-1"), keep_blank_values=True))
                statuses.append(registry.get_route(query).status)
    assert set(statuses) <= {200, 400, 404, 503}, statuses
    assert registry.registered <= len(parts)
    return 200 in statuses


BODIES: tuple[tuple[type[msgspec.Struct], msgspec.Struct], ...] = (
    (InstanceCard, CARD),
    (AbortRequest, AbortRequest("rid", KEY)),
    (LoadReport, LoadReport("i", ready=True, draining=False, loads=(Load(1, 2), Load(3)))),
    (CanaryRequest, CanaryRequest("c-prefill-0", "c-decode-0")),
    (TokenizerAnswer, TokenizerAnswer("t", {"tokenizer.json": "e30="})),
)


POD = PodCard(1, RankAddress("127.64.0.3", 8998), "s3")
POD_BODIES: tuple[tuple[type[msgspec.Struct], msgspec.Struct], ...] = (
    (
        PodReport,
        PodReport(
            cluster="c",
            instance="c-prefill-0",
            pod=POD,
            incarnation="i",
            hellos=(HELLO,),
            pulses=((HELLO.coordinate, Pulse(3, Load(1))),),
            ended=(InstanceDied("i0", "gone"),),
            questions=(PEER,),
            dumps=(Dump(1, ((HELLO.coordinate, b"{}"),)),),
        ),
    ),
    (OrdersAsked, OrdersAsked(instance="c-prefill-0", pod=POD, leader="s", after=3)),
    (
        Orders,
        Orders(session="s", first=1, orders=(PeersKnown((CARD,)), InstanceDied("i0"))),
    ),
    (
        PodAnswer,
        PodAnswer(
            session="s", incarnation="i", answers=((HELLO.coordinate, HelloAnswer("", PEER)),)
        ),
    ),
)


def check_pods(parts: Parts) -> bool:
    """What the pods of one instance tell each other is as expected, or a `WireError`."""
    taken = False
    for part in parts:
        for kind, _ in POD_BODIES:
            try:
                body = decode_pod_body(part, kind)
            except WireError:
                continue
            taken = True
            assert body == decode_pod_body(msgspec.msgpack.encode(body), kind)
    return taken


def check_control(parts: Parts) -> bool:
    """A body of `/pd/v1/` is what its path expects, or a `WireError`; a card may pair or not."""
    taken = False
    for part in parts:
        for kind, _ in BODIES:
            try:
                body = decode_body(part, kind)
            except WireError:
                continue
            taken = True
            assert msgspec.json.encode(body)
            if isinstance(body, InstanceCard):
                _greeted(body)
    return taken


def _greeted(theirs: InstanceCard) -> None:
    ours = InstanceNode(PLAN, Limits()).card(1.0)
    pairing_refusal(ours, theirs)
    peers = PeerTable(Limits(peers_max=1))
    try:
        peer, _ = peers.meet(theirs, 1.0)
    except RemoteProtocolError:
        assert () == theirs.ranks
        return
    assert peers.of_session(theirs.session) is peer
    peers.drop(peer)
    assert () == peers.all()


RING = KeyRing({"k1": b"k" * 32})
OTHER_RING = KeyRing({"k1": b"o" * 32})
HERE, ELSEWHERE = "127.64.0.1:8998", "127.64.0.2:8998"
REQUESTS = (("POST", "/pd/v1/hello", b'{"cluster": "c"}'), ("GET", "/pd/v1/load?a=%20", b""))


def _signed(signer: HttpSigner, authority: str) -> tuple[tuple[bytes, ...], ...]:
    return tuple(
        (
            signer.sign(method, target, body, authority=authority).encode(),
            method.encode(),
            target.encode(),
            body,
        )
        for method, target, body in REQUESTS
    )


SIGNED = _signed(HttpSigner(RING, "router"), HERE)
FOREIGN = (
    *_signed(HttpSigner(RING, "router"), ELSEWHERE),
    *_signed(HttpSigner(OTHER_RING, "router"), HERE),
)
GENUINE = frozenset(SIGNED)


def check_signatures(parts: Parts) -> bool:
    """Exactly what was signed for this server with our key is let in, and only once."""
    verifier = HttpVerifier(RING, window=64, sessions_max=4)
    first = _admitted(verifier, parts)
    assert first is (tuple(parts) in GENUINE)
    assert not _admitted(verifier, parts), "a replay was let in"
    genuine = list(SIGNED[len(parts) % len(SIGNED)])
    assert _admitted(verifier, genuine) is (genuine != parts)
    return first


def _admitted(verifier: HttpVerifier, parts: Parts) -> bool:
    if len(parts) != 4:
        return False
    # As aiohttp reads heads: UTF-8, with what is none of it kept as surrogates.
    header, method, target = (part.decode("utf-8", "surrogateescape") for part in parts[:3])
    try:
        verifier.verify(header, method, target, parts[3], authorities=[HERE])
    except Unauthorized:
        return False
    return True


TARGETS = (
    Target(
        "registry",
        (
            (
                msgspec.json.encode(ROW),
                b'{"bootstrap_room": 7, "dp_rank": 0}',
                b'{"bootstrap_rooms": [7, 8]}',
                QUERY,
            ),
            (msgspec.json.encode(ROW | {"attn_tp_size": 1, "attn_tp_rank": 0}), b"", b"", SENTINEL),
        ),
        check_registry,
        weight=2,
    ),
    Target("control", one_part(*(msgspec.json.encode(body) for _, body in BODIES)), check_control),
    Target("pods", one_part(*(msgspec.msgpack.encode(body) for _, body in POD_BODIES)), check_pods),
    Target("signatures", (*SIGNED, *FOREIGN), check_signatures),
)
