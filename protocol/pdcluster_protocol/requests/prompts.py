"""The prompt of each API: text, token ids, lists of them, or chat messages."""

from __future__ import annotations

import msgspec

from pdcluster_protocol.errors import InvalidRequest, Reason
from pdcluster_protocol.requests.fields import Fields
from pdcluster_protocol.requests.parsed import Api, RequestLimits
from pdcluster_protocol.requests.sampling import TOKEN_ID_MAX
from pdcluster_protocol.undecodable import UNDECODABLE

Prompt = str | tuple[int, ...]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
"""OpenAI's roles as chat templates know them: `developer` is its newer word for `system`."""

PROMPT_FIELDS = {Api.COMPLETIONS: "prompt", Api.CHAT: "messages", Api.GENERATE: "text"}
PROMPT_MUST = "be a string, a list of token ids, or a list of these"


def parse_prompts(
    api: Api, body: Fields, limits: RequestLimits
) -> tuple[tuple[Prompt, ...], tuple[dict[str, str], ...] | None, bool]:
    """Prompts, chat messages, and whether the prompt came as a list of prompts.

    Every API takes `input_ids` in place of its own field: a router has tokenised already.

    Raises:
        InvalidRequest: the prompt is missing, doubled, empty, of a wrong type or out of range.
    """
    own = PROMPT_FIELDS[api]
    if body.has(own) and body.has("input_ids"):
        raise InvalidRequest(f"{own} and input_ids are both given; send one", field="input_ids")
    if body.has("input_ids"):
        own = "input_ids"
    if not body.has(own):
        raise InvalidRequest(f"{own} is missing; it must hold the prompt", field=own)
    if own == "messages":
        return (), _messages(body, limits), False
    prompts, batched = _prompts(body, own)
    _check_prompts(body, own, prompts, limits)
    return prompts, None, batched


def _prompts(body: Fields, name: str) -> tuple[tuple[Prompt, ...], bool]:
    if body.first_byte(name) != b"[":
        if name == "input_ids":
            raise body.refusal(name, "be a list of token ids, or a list of such lists")
        return (body.value(name, str, PROMPT_MUST) or "",), False
    raw = body.raw[name]
    try:
        return (tuple(msgspec.json.decode(raw, type=list[int])),), False
    except UNDECODABLE:
        pass
    try:
        return tuple(msgspec.json.decode(raw, type=list[str])), True
    except UNDECODABLE:
        ids = body.value(name, list[list[int]], PROMPT_MUST) or []
        return tuple(tuple(prompt) for prompt in ids), True


def _check_prompts(
    body: Fields, name: str, prompts: tuple[Prompt, ...], limits: RequestLimits
) -> None:
    if name == "input_ids" and any(isinstance(prompt, str) for prompt in prompts):
        raise body.refusal(name, "be a list of token ids, or a list of such lists")
    if name == "text" and not all(isinstance(prompt, str) for prompt in prompts):
        raise body.refusal(name, "be a string or a list of strings; ids go into input_ids")
    if len(prompts) > limits.batch_max:
        raise InvalidRequest(
            f"{name} has {len(prompts)} prompts; send at most {limits.batch_max}", field=name
        )
    highest = TOKEN_ID_MAX if limits.vocab_size is None else limits.vocab_size - 1
    for index, prompt in enumerate(prompts):
        path = f"{name}[{index}]" if len(prompts) > 1 else name
        if not prompt:
            raise InvalidRequest(f"{path} is empty; give at least one token", field=name)
        if not isinstance(prompt, str) and not (min(prompt) >= 0 and max(prompt) <= highest):
            wrong = next(token for token in prompt if not 0 <= token <= highest)
            raise InvalidRequest(
                f"{path} holds the token id {wrong}; ids must be in [0, {highest}]", field=name
            )


def _messages(body: Fields, limits: RequestLimits) -> tuple[dict[str, str], ...]:
    must = "be a list of objects with role and content"
    raw = body.value("messages", list[dict[str, msgspec.Raw]], must)
    if not raw:
        raise body.refusal("messages", "hold at least one message")
    if len(raw) >= limits.max_context:
        # Each of them is at least one token; it must not even be looked at.
        raise InvalidRequest(
            f"messages has {len(raw)} entries; with max_context {limits.max_context} it must have"
            f" less than {limits.max_context}",
            field="messages",
            reason=Reason.TOO_LARGE,
        )
    return tuple(
        _message(Fields(entry, prefix=f"messages[{index}].")) for index, entry in enumerate(raw)
    )


def _message(message: Fields) -> dict[str, str]:
    for name in ("role", "content"):
        if not message.has(name):
            path = message.path(name)
            raise InvalidRequest(f"{path} is missing; every message needs one", field=path)
    for name in ("tool_calls", "function_call", "audio"):
        if message.has(name):
            raise message.refusal(name, "be absent: not supported", reason=Reason.UNSUPPORTED)
    role = message.string("role") or ""
    if role in ("tool", "function"):
        raise message.refusal("role", "not be a tool's: not supported", reason=Reason.UNSUPPORTED)
    if role not in ROLES:
        raise message.refusal("role", f"be one of {', '.join(ROLES)}")
    rendered = {"role": ROLES[role], "content": _content(message)}
    name_of_speaker = message.string("name")
    if name_of_speaker is not None:
        rendered["name"] = name_of_speaker
    return rendered


def _content(message: Fields) -> str:
    """The text of a message; its text parts are joined by newlines."""
    must = "be a string, or a list of parts of type text"
    if message.first_byte("content") != b"[":
        return message.value("content", str, must) or ""
    parts = message.value("content", list[dict[str, msgspec.Raw]], must) or []
    texts: list[str] = []
    for index, raw in enumerate(parts):
        part = Fields(raw, prefix=f"{message.path('content')}[{index}].")
        kind = part.string("type")
        if kind is not None and kind != "text":
            raise part.refusal("type", "be text: not supported", reason=Reason.UNSUPPORTED)
        text = part.string("text")
        if text is None:
            path = part.path("text")
            raise InvalidRequest(f"{path} is missing; a part needs text", field=path)
        texts.append(text)
    return "\n".join(texts)
