"""The control channel between sidecars: multipart messages, their trailers and their MACs."""

from __future__ import annotations

from fuzz.mutation import Parts
from fuzz.target import Target
from pdcluster_protocol.authentication import FrameSigner, FrameVerifier, KeyRing
from pdcluster_protocol.errors import Unauthorized, WireError
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.messages import (
    Abort,
    AbortAck,
    Accepted,
    AuxData,
    Bootstrap,
    Concluded,
    RegisterKVArgs,
    Run,
    RunsLanded,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.push import frames, trailers
from pdcluster_protocol.sidecar_messages import InstanceDied, Ping

RING = KeyRing({"k1": b"k" * 32, "k2": b"l" * 32})
OTHER_RING = KeyRing({"k1": b"o" * 32})
KEY = Key((1 << 62) + 5, 1000 << 22)
PEER = RankAddress("127.64.0.2", 9000)
SESSIONS_MAX = 4

MESSAGES: tuple[frames.Message, ...] = (
    RegisterKVArgs(
        PEER,
        "127.64.0.2:15001",
        (4096, 8192),
        (1 << 40, (1 << 40) + 64),
        (96, 32),
        ((1 << 33,),),
        ((16,),),
        (0, 1),
        ((0,),),
        layout_digest="0123456789abcdef",
        page_count=64,
        slot_count=4,
        mapping=1,
    ),
    TransferMetadata(
        KEY,
        PEER,
        "127.64.0.2:15001",
        b"\5\0\0\0\6\0\0\0",
        3,
        state_indices=((5, 6),),
        prompt_tokens=100,
        prompt_digest="fedcba9876543210",
        epoch=9,
        mapping=1,
    ),
    TransferMetadata(KEY, PEER, "127.64.0.2:15001", b"", None, dummy=True),
    Bootstrap(KEY, PEER),
    Abort(KEY, PEER, 17),
    AbortAck(KEY, 3, 17, drained=False),
    Accepted(KEY, 3),
    RunsLanded(KEY, 3, 9, (Run(0, 0, 5, 2, 8192, 1 << 60), Run(1, 2, 3, 1, 64, 7))),
    Status(KEY, 4, 3, 2, prompt_tokens=100, prompt_digest="fedcba9876543210", reply_to=PEER),
    Status(KEY, 4, 3, 2, (Run(1, 2, 3, 1, 64, 7),), 9, reply_to=PEER),
    Status(KEY, 0, 3, drained=False, reason="Stalled", detail="no byte for 30 s"),
    Concluded(KEY, 4),
    AuxData(KEY, 1, 2, b"row of sixteen b"),
    Ping("incarnation", (1, 2, 3), draining=True),
    InstanceDied("incarnation", "the link closed"),
)


def _sealed(ring: KeyRing, sender: str, receiver: str) -> tuple[tuple[bytes, ...], ...]:
    signer = FrameSigner(ring, sender)
    return tuple(
        tuple(frames.seal(message, signer=signer, receiver=receiver, incarnation="incarnation"))
        for message in MESSAGES
    )


SEALED = _sealed(RING, "sender", "receiver/9000")
PLAIN = tuple(tuple(frames.encode(message)) for message in MESSAGES)


def check_frames(parts: Parts) -> bool:
    """A message or a `WireError`; and what was understood is understood alike when said again."""
    try:
        content, trailer, _ = trailers.split(parts)
        message = frames.decode(content, trailer)
    except WireError:
        return False
    again = frames.seal(
        message, signer=FrameSigner(RING, "a"), receiver="b", incarnation="incarnation"
    )
    content, trailer, _ = trailers.split(again)
    assert message == frames.decode(content, trailer)
    return True


GENUINE = frozenset(SEALED)
FOREIGN = (
    *_sealed(RING, "sender", "receiver/9001"),
    *_sealed(OTHER_RING, "sender", "receiver/9000"),
)


def check_seals(parts: Parts) -> bool:
    """Exactly what was sealed for us with our key is let in, and that only once."""
    verifier = FrameVerifier(RING, "receiver/9000", window=64, sessions_max=SESSIONS_MAX)
    first = _admitted(verifier, parts)
    assert first is (tuple(parts) in GENUINE)
    assert not _admitted(verifier, parts), "a replay was let in"
    # What was refused has left no trace that would keep the genuine ones out.
    genuine = list(SEALED[len(parts) % len(SEALED)])
    assert _admitted(verifier, genuine) is (genuine != parts)
    return first


def _admitted(verifier: FrameVerifier, parts: Parts) -> bool:
    try:
        _, trailer, mac = trailers.split(parts)
        if trailer is None:
            return False
        verifier.verify(parts[:-1], mac, trailer.stamp)
    except (WireError, Unauthorized):
        return False
    return True


TARGETS = (
    Target("frames", (*SEALED, *PLAIN), check_frames, weight=4),
    Target("seals", (*SEALED, *FOREIGN), check_seals, weight=2),
)
