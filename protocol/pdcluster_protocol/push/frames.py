"""Messages to multipart frames and back: SGLang's Mooncake dialect, and what we add to it.

A message is a list of frames. Those that SGLang knows have exactly its frames; our own have two, a
tag `PD_…` and a msgpack body. `trailers` are the two frames behind them, for our own peers only.

    registration   None, ip, port, session, kv u64[], aux u64[], state lists(Q), tp rank, tp size,
                   item, state items lists(I), slice dims, layers u32[], state layers lists(I),
                   staging base, staging size, dcp size, dcp rank, staging layers, items u64[]
    metadata       room, ip, port, session, pages i32[], aux, state lists(i), required, prefix, -
    BOOTSTRAP      BOOTSTRAP, room, ip, port
    ABORT          ABORT, room, ip, port, generation
    ABORT_ACK      ABORT_ACK, room, rank, generation
    status         room, status, rank
    AUX_DATA       AUX_DATA, room, buffer, slot, length as big-endian u32, row

Everything here is peer input: it may be anything, and ends in a message or in a `WireError`. A room
without a trailer has attempt 0; an `ABORT` without return address has the address `("", 0)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pdcluster_protocol import codec
from pdcluster_protocol.authentication import FrameSigner
from pdcluster_protocol.errors import WireError
from pdcluster_protocol.ids import ATTEMPT_MAX, ROOM_MAX, Key, RankAddress
from pdcluster_protocol.limits import Limits
from pdcluster_protocol.messages import (
    Abort,
    AbortAck,
    Accepted,
    AuxData,
    Bootstrap,
    Concluded,
    KVPoll,
    NodeMessage,
    RegisterKVArgs,
    RunsLanded,
    Status,
    TransferMetadata,
)
from pdcluster_protocol.push.fields import (
    lists,
    numbers,
    pack_lists,
    pack_numbers,
    parse_address,
    parse_integer,
    parse_room,
    parse_text,
)
from pdcluster_protocol.push.trailers import Carried, Extra, Trailer, append
from pdcluster_protocol.sidecar_messages import SidecarMessage

Message = NodeMessage | SidecarMessage
_encoder: Final = msgspec.msgpack.Encoder()
_KEYLESS: Final = Key(0, 0)
_RUNS_MAX: Final = Limits().runs_per_message_max
_STATUS_RUNS_MAX: Final = Limits().runs_per_status_max


def seal(message: Message, *, signer: FrameSigner, receiver: str, incarnation: str) -> list[bytes]:
    """The frames of `message` with trailer and MAC, for the session `receiver`.

    Raises:
        WireError: the message does not fit its frames.
    """
    frames = encode(message)
    append(
        frames,
        signer=signer,
        receiver=receiver,
        incarnation=incarnation,
        carried=Carried(
            getattr(message, "key", None),
            _extra(message),
            message.landed if isinstance(message, Status) else (),
        ),
    )
    return frames


def encode(message: Message) -> list[bytes]:
    """The frames of `message` without trailer: what a plain SGLang peer gets.

    Raises:
        WireError: the message does not fit its frames.
    """
    match message:
        case RegisterKVArgs():
            return _encode_registration(message)
        case TransferMetadata():
            return _encode_metadata(message)
        case Bootstrap():
            return [b"BOOTSTRAP", _digits(message.key.room), *_address(message.reply_to)]
        case Abort():
            frames = [b"ABORT", _digits(message.key.room), *_address(message.reply_to)]
            return frames + _optional(message.generation)
        case AbortAck():
            frames = [b"ABORT_ACK", _digits(message.key.room), _digits(message.rank)]
            return frames + _optional(message.generation)
        case Status():
            return [_digits(message.key.room), _digits(message.status), _digits(message.rank)]
        case AuxData():
            place = [_digits(number) for number in (message.key.room, message.buffer, message.slot)]
            return [b"AUX_DATA", *place, len(message.row).to_bytes(4, "big"), message.row]
        case _:
            # A union of structs with tags: the tag is the frame that SGLang would look at.
            return [str(message.__struct_config__.tag).encode(), _encoder.encode(message)]


def decode(content: Sequence[bytes], trailer: Trailer | None = None) -> Message:
    """The message in frames that were cut by `split`.

    Raises:
        WireError: whatever is wrong with them.
    """
    if not content:
        raise WireError("a message without frames")
    tag = content[0]
    decoder = _BY_TAG.get(tag)
    if decoder is not None:
        message = decoder(content, trailer)
    elif tag.startswith(b"PD_"):
        message = _decode_own(content)
    elif len(content) < _METADATA_FRAMES_MIN:
        message = _decode_status(content, trailer)
    else:
        message = _decode_metadata(content, trailer)
    if trailer is not None and (trailer.key or _KEYLESS) != getattr(message, "key", _KEYLESS):
        raise WireError(f"the trailer's key {trailer.key} is not the key of the message")
    return message


# --- the dialect's messages ---------------------------------------------------------------------

_METADATA_FRAMES_MIN: Final = 7
_REGISTRATION_FRAMES_MIN: Final = 10


def _encode_registration(message: RegisterKVArgs) -> list[bytes]:
    lengths = message.kv_item_lengths
    return [
        b"None",
        *_address(message.reply_to),
        message.session.encode(),
        pack_numbers("Q", message.kv_pointers),
        pack_numbers("Q", message.aux_pointers),
        pack_lists("Q", message.state_pointers),
        _digits(message.decode_tp_rank),
        _digits(message.decode_tp_size),
        _digits(lengths[0] if lengths else 0),
        pack_lists("I", message.state_item_lengths),
        b"",
        pack_numbers("I", message.kv_layer_ids),
        pack_lists("I", message.state_layer_ids),
        b"",
        b"",
        _digits(message.dcp_size),
        _digits(message.dcp_rank),
        b"",
        pack_numbers("Q", lengths),
    ]


def _decode_registration(content: Sequence[bytes], trailer: Trailer | None) -> RegisterKVArgs:
    _at_least(content, _REGISTRATION_FRAMES_MIN, "registration")
    frames = [*content[:20], *[b""] * (20 - len(content))]
    pointers = numbers("Q", frames[4], "kv pointers")
    # Old senders have one length for all entries, in frame 9.
    lengths = numbers("Q", frames[19], "kv item lengths")
    if not lengths and pointers:
        lengths = (parse_integer(frames[9], "kv item length"),) * len(pointers)
    if len(lengths) != len(pointers):
        raise WireError(f"{len(pointers)} kv pointers, but {len(lengths)} kv item lengths")
    extra = Extra(trailer)
    return RegisterKVArgs(
        reply_to=parse_address(frames[1], frames[2]),
        session=parse_text(frames[3], "session"),
        kv_pointers=pointers,
        aux_pointers=numbers("Q", frames[5], "aux pointers"),
        kv_item_lengths=lengths,
        state_pointers=lists("Q", frames[6], "state pointers"),
        state_item_lengths=lists("I", frames[10], "state item lengths"),
        kv_layer_ids=numbers("I", frames[12], "kv layer ids"),
        state_layer_ids=lists("I", frames[13], "state layer ids"),
        decode_tp_rank=parse_integer(frames[7], "decode tp rank"),
        decode_tp_size=parse_integer(frames[8], "decode tp size", low=1),
        dcp_size=parse_integer(frames[16] or b"1", "dcp size", low=1),
        dcp_rank=parse_integer(frames[17] or b"0", "dcp rank"),
        decode_pp_rank=extra.number("decode_pp_rank"),
        decode_pp_size=max(1, extra.number("decode_pp_size", default=1)),
        layout_digest=extra.text("layout_digest"),
        page_count=extra.number("page_count"),
        slot_count=extra.number("slot_count"),
        slot_bytes=extra.number("slot_bytes"),
        mapping=extra.number("mapping"),
    )


def _encode_metadata(message: TransferMetadata) -> list[bytes]:
    empty = not message.pages and message.aux_index is None
    if message.dummy != empty or (message.dummy and message.state_indices):
        raise WireError("metadata is a dummy exactly when it has neither pages nor aux index")
    return [
        _digits(message.key.room),
        *_address(message.reply_to),
        message.session.encode(),
        message.pages,
        b"" if message.aux_index is None else _digits(message.aux_index),
        pack_lists("i", message.state_indices),
        _digits(message.required_destinations),
        _digits(message.prefix_tokens),
        b"",
    ]


def _decode_metadata(content: Sequence[bytes], trailer: Trailer | None) -> TransferMetadata:
    frames = [*content[:10], *[b""] * (10 - len(content))]
    pages, aux = bytes(frames[4]), frames[5]
    if len(pages) % 4 or len(pages) // 4 > Limits().pages_per_request_max:
        raise WireError(f"pages: {len(pages)} bytes are no list of 32-bit page numbers")
    if frames[9]:
        raise WireError("device page ids are not supported; send one list of pages")
    dummy, state_indices = not pages and not aux, lists("i", frames[6], "state indices")
    if dummy and any(state_indices):
        raise WireError("metadata without pages and aux index has state indices")
    extra = Extra(trailer)
    return TransferMetadata(
        key=_key(frames[0], trailer),
        reply_to=parse_address(frames[1], frames[2]),
        session=parse_text(frames[3], "session"),
        pages=pages,
        aux_index=parse_integer(aux, "aux index") if aux else None,
        required_destinations=parse_integer(frames[7] or b"1", "required destinations", low=1),
        prefix_tokens=parse_integer(frames[8] or b"0", "prefix length"),
        state_indices=() if dummy else state_indices,
        dummy=dummy,
        prompt_tokens=extra.number("prompt_tokens"),
        prompt_digest=extra.text("prompt_digest"),
        epoch=extra.number("epoch"),
        mapping=extra.number("mapping"),
    )


def _decode_bootstrap(content: Sequence[bytes], trailer: Trailer | None) -> Bootstrap:
    _at_least(content, 4, "BOOTSTRAP")
    return Bootstrap(_key(content[1], trailer), parse_address(content[2], content[3]))


def _decode_abort(content: Sequence[bytes], trailer: Trailer | None) -> Abort:
    _at_least(content, 2, "ABORT")
    silent = len(content) < 4 or (not content[2] and content[3] == b"0")
    reply_to = RankAddress("", 0) if silent else parse_address(content[2], content[3])
    return Abort(_key(content[1], trailer), reply_to, _generation(content, 4))


def _decode_abort_ack(content: Sequence[bytes], trailer: Trailer | None) -> AbortAck:
    _at_least(content, 3, "ABORT_ACK")
    rank = parse_integer(content[2], "rank")
    drained = bool(Extra(trailer).number("drained", default=1))
    return AbortAck(_key(content[1], trailer), rank, _generation(content, 3), drained)


def _decode_status(content: Sequence[bytes], trailer: Trailer | None) -> Status:
    _at_least(content, 3, "status")
    extra = Extra(trailer)
    landed = () if trailer is None else trailer.runs
    if len(landed) > _STATUS_RUNS_MAX:
        raise WireError(f"status: {len(landed)} runs; at most {_STATUS_RUNS_MAX} are taken")
    return Status(
        key=_key(content[0], trailer),
        status=parse_integer(content[1], "status", high=max(KVPoll)),
        rank=parse_integer(content[2], "rank"),
        runs=extra.number("runs"),
        landed=landed,
        epoch=extra.number("epoch"),
        drained=bool(extra.number("drained", default=1)),
        prompt_tokens=extra.number("prompt_tokens"),
        prompt_digest=extra.text("prompt_digest"),
        reason=extra.text("reason"),
        detail=extra.text("detail"),
        reply_to=_reply_to(extra),
    )


def _reply_to(extra: Extra) -> RankAddress | None:
    host, port = extra.text("reply_host"), extra.number("reply_port")
    return RankAddress(host, port) if host and port else None


def _decode_aux(content: Sequence[bytes], trailer: Trailer | None) -> AuxData:
    _at_least(content, 6, "AUX_DATA")
    row = bytes(content[5])
    if content[4] != len(row).to_bytes(4, "big"):
        raise WireError(f"AUX_DATA: the length frame does not name the row's {len(row)} bytes")
    buffer = parse_integer(content[2], "buffer")
    return AuxData(_key(content[1], trailer), buffer, parse_integer(content[3], "slot"), row)


_OWN: Final = (Accepted, RunsLanded, Concluded)


def _decode_own(content: Sequence[bytes]) -> Message:
    _at_least(content, 2, "our own message")
    sidecar = content[0] in (b"PD_PING", b"PD_DIED")
    message: Message = (codec.sidecar_messages if sidecar else codec.node_messages).decode(
        content[1]
    )
    if str(message.__struct_config__.tag).encode() != content[0]:
        raise WireError(f"the body is a {message.__struct_config__.tag}, the tag says otherwise")
    if not sidecar and not isinstance(message, _OWN):
        raise WireError(f"{message.__struct_config__.tag} is sent in frames, not as a body")
    key = getattr(message, "key", None)
    if key is not None and not (1 <= key.room <= ROOM_MAX and 0 <= key.attempt <= ATTEMPT_MAX):
        raise WireError(f"key {key} is out of range")
    if isinstance(message, RunsLanded) and len(message.runs) > _RUNS_MAX:
        raise WireError(f"{len(message.runs)} runs; at most {_RUNS_MAX} are taken")
    return message


_BY_TAG: Final[dict[bytes, Callable[[Sequence[bytes], Trailer | None], Message]]] = {
    b"None": _decode_registration,
    b"BOOTSTRAP": _decode_bootstrap,
    b"ABORT": _decode_abort,
    b"ABORT_ACK": _decode_abort_ack,
    b"AUX_DATA": _decode_aux,
}


def _extra(message: Message) -> dict[str, bool | int | str]:
    """The fields of `message` that SGLang has no frame for."""
    names: tuple[str, ...]
    match message:
        case RegisterKVArgs():
            names = ("layout_digest", "page_count", "slot_count", "slot_bytes", "mapping")
            if message.decode_pp_size != 1:
                names += ("decode_pp_rank", "decode_pp_size")
        case TransferMetadata():
            names = ("prompt_tokens", "prompt_digest", "epoch", "mapping")
        case Status():
            names = (
                "runs",
                "epoch",
                "drained",
                "prompt_tokens",
                "prompt_digest",
                "reason",
                "detail",
            )
            if message.reply_to is not None:
                address = {"reply_host": message.reply_to.host, "reply_port": message.reply_to.port}
                return {**{name: getattr(message, name) for name in names}, **address}
        case AbortAck():
            names = ("drained",)
        case _:
            names = ()
    return {name: getattr(message, name) for name in names}


def _key(frame: bytes, trailer: Trailer | None) -> Key:
    room = parse_room(frame)
    return (
        Key(room, 0) if trailer is None or trailer.key is None else Key(room, trailer.key.attempt)
    )


def _generation(content: Sequence[bytes], index: int) -> int | None:
    """SGLang's count of cancels; what cannot be parsed counts as absent, as there."""
    try:
        return parse_integer(content[index], "generation") if len(content) > index else None
    except WireError:
        return None


def _digits(number: int) -> bytes:
    return b"%d" % number


def _optional(number: int | None) -> list[bytes]:
    return [] if number is None else [_digits(number)]


def _address(address: RankAddress) -> list[bytes]:
    return [address.host.encode(), _digits(address.port)]


def _at_least(content: Sequence[bytes], count: int, name: str) -> None:
    if len(content) < count:
        raise WireError(f"{name}: {len(content)} frames; at least {count} are needed")
