"""From a body to a `ParsedRequest`, and the one check that needs the tokenised prompt."""

from __future__ import annotations

from collections.abc import Callable

from pdcluster_protocol.errors import InvalidRequest, Reason
from pdcluster_protocol.requests.fields import Fields, decode_object
from pdcluster_protocol.requests.legs import parse_leg
from pdcluster_protocol.requests.parsed import Api, ParsedRequest, RequestLimits
from pdcluster_protocol.requests.prompts import parse_prompts
from pdcluster_protocol.requests.sampling import (
    parse_max_tokens,
    parse_n,
    parse_sampling,
    parse_seed,
)
from pdcluster_protocol.requests.unsupported import refuse_unsupported

RID_CHARACTERS_MAX = 256
CHARACTERS_PER_TOKEN = 2
"""The first beginning of a long text that is encoded, for each token that would fit."""
CUT_TOKENS = 64
"""So many tokens at the end of a beginning may come out otherwise in the whole text."""
UNNAMED_MODEL = "unknown"
"""What SGLang's routers write where a client named no model, as `/generate` knows none."""
MAX_TOKENS_NAMES = {
    Api.COMPLETIONS: "max_tokens",
    Api.CHAT: "max_completion_tokens",
    Api.GENERATE: "sampling_params.max_new_tokens",
}
MAX_TOKENS_DEFAULTS = {Api.COMPLETIONS: 16, Api.CHAT: None, Api.GENERATE: 128}
"""What each API says; None: as many as fit."""


def parse_request(
    api: Api, body: bytes, limits: RequestLimits, *, legs: bool = True
) -> ParsedRequest:
    """Understand a client's body, or a leg's.

    With `legs` False, at the door of clients, the fields that make a leg mean nothing, however
    they look: they are never trusted, so they are not worth a refusal either.

    Raises:
        InvalidRequest: with the field and one of the reasons `InvalidRequest`, `Unsupported` and
            `ModelNotFound`; the detail names field, value and fix.
    """
    fields = decode_object(body)
    sampled = fields.nested("sampling_params") if api is Api.GENERATE else fields
    refuse_unsupported(fields)
    if sampled is not fields:
        refuse_unsupported(sampled)
    model = _model(fields, limits)
    prompts, messages, batched = parse_prompts(api, fields, limits)
    n = parse_n(sampled, limits)
    sequence_count = max(1, len(prompts)) * n
    if sequence_count > limits.batch_max:
        raise InvalidRequest(
            f"{sampled.path('n')} is {n} for {len(prompts)} prompts, together {sequence_count}"
            f" sequences; ask for at most {limits.batch_max} at once",
            field=sampled.path("n"),
        )
    return ParsedRequest(
        api=api,
        raw=fields.raw,
        model=model,
        prompts=prompts,
        messages=messages,
        batched=batched,
        n=n,
        stream=fields.boolean("stream"),
        include_usage=fields.nested("stream_options").boolean("include_usage"),
        max_tokens=parse_max_tokens(api, sampled),
        seed=parse_seed(sampled, fields),
        rids=_rids(fields, prompt_count=max(1, len(prompts))),
        sampling=parse_sampling(api, sampled, body=fields, limits=limits),
        leg=parse_leg(fields, prompt_count=max(1, len(prompts)), samples=n) if legs else None,
    )


def encode_bounded(
    text: str, encode: Callable[[str], list[int]], limits: RequestLimits
) -> list[int]:
    """The tokens of a text, for which one that is far too long is never encoded as a whole.

    Encoding takes hundreds of bytes of memory and a microsecond for each character, and nobody can
    stop it. So beginnings of doubling length come first, until one has too many tokens already.

    Raises:
        InvalidRequest: `TooLarge`, when a beginning alone leaves no room for an output token.
    """
    length = limits.max_context * CHARACTERS_PER_TOKEN
    while length < len(text):
        if len(encode(text[:length])) >= limits.max_context + CUT_TOKENS:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters and more than {limits.max_context} tokens;"
                f" with max_context {limits.max_context} it must have at most"
                f" {limits.max_context - 1}, so that one output token fits",
                field="prompt",
                reason=Reason.TOO_LARGE,
            )
        length *= 2
    return encode(text)


def check_prompt_length(token_count: int, parsed: ParsedRequest, limits: RequestLimits) -> int:
    """How many output tokens a sequence of so many prompt tokens may have, at least 1.

    Raises:
        InvalidRequest: `TooLarge`, when the prompt leaves no room for one output token, or when
            the client asked for more tokens than fit behind it.
    """
    if token_count < 1:
        raise InvalidRequest("the prompt has 0 tokens; give at least one token", field="prompt")
    room = limits.max_context - token_count
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {token_count} tokens; with max_context {limits.max_context} it must"
            f" have at most {limits.max_context - 1}, so that one output token fits",
            field="prompt",
            reason=Reason.TOO_LARGE,
        )
    if parsed.max_tokens is None:
        return min(MAX_TOKENS_DEFAULTS[parsed.api] or room, room)
    if parsed.max_tokens > room:
        name = MAX_TOKENS_NAMES[parsed.api]
        raise InvalidRequest(
            f"{name} is {parsed.max_tokens}; behind a prompt of {token_count} tokens and with"
            f" max_context {limits.max_context} it must be at most {room}",
            field=name,
            reason=Reason.TOO_LARGE,
        )
    return parsed.max_tokens


def _model(fields: Fields, limits: RequestLimits) -> str:
    model = fields.string("model")
    if model not in (None, UNNAMED_MODEL, limits.served_name):
        raise fields.refusal("model", f"be {limits.served_name}", reason=Reason.MODEL_NOT_FOUND)
    return limits.served_name


def _rids(fields: Fields, *, prompt_count: int) -> tuple[str, ...]:
    must = f"be a string of 1 to {RID_CHARACTERS_MAX} characters, or a list with one per prompt"
    if not fields.has("rid"):
        return ()
    if fields.first_byte("rid") != b"[":
        rids = [fields.value("rid", str, must) or ""]
    else:
        rids = fields.value("rid", list[str], must) or []
        if len(rids) != prompt_count or len(set(rids)) != prompt_count:
            raise fields.refusal("rid", f"have {prompt_count} different entries, one per prompt")
    if not all(1 <= len(rid) <= RID_CHARACTERS_MAX for rid in rids):
        raise fields.refusal("rid", must)
    return tuple(rids)
