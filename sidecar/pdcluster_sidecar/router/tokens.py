"""Text to token ids, with the very files that the engines use.

The prompt is tokenised once, here, and both legs get the same ids. The files come from a sidecar
(`/pd/v1/tokenizer`), so the router needs no model folder; equal digests are one tokenizer.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pdcluster_protocol.errors import InvalidRequest, WireError
from pdcluster_protocol.requests import ParsedRequest, RequestLimits, encode_bounded
from pdcluster_protocol.undecodable import UNDECODABLE

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
SHORT_CHARACTERS_MAX = 1024
"""Texts of this length are tokenised in well under a millisecond."""


class TokenizerAnswer(msgspec.Struct, frozen=True):
    """Answer of `GET /pd/v1/tokenizer`; the files are base64."""

    digest: str
    files: dict[str, str]


class Codec:
    """One tokenizer with its chat template."""

    __slots__ = ("_special", "_template", "_tokenizer", "digest", "vocab_size")

    def __init__(
        self, digest: str, tokenizer: Tokenizer, special: Mapping[str, str], template: str | None
    ) -> None:
        self.digest = digest
        self._tokenizer = tokenizer
        self._special = dict(special)
        self._template = None if template is None else _compile(template)
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))

    @classmethod
    def of(cls, answer: TokenizerAnswer) -> Codec:
        """The codec of a sidecar's answer.

        Raises:
            WireError: naming the file that is missing or broken.
        """
        config = _json_object(answer.files, "tokenizer_config.json")
        special = {name: token for name in SPECIAL_TOKENS if (token := _content(config.get(name)))}
        template = config.get("chat_template")
        if template is not None and not isinstance(template, str):
            raise WireError("tokenizer_config.json: chat_template is no string")
        raw = _file(answer.files, "tokenizer.json")
        try:
            tokenizer = Tokenizer.from_buffer(raw)
        # The library raises Exception itself.
        except Exception as error:
            raise WireError(f"tokenizer.json: {error}") from error
        return cls(answer.digest, tokenizer, special, template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        The batch call releases the interpreter's lock while it works, and the fast one leaves out
        where each token stood in the text: a third of the time of a short prompt.
        """
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(batch[0].ids)

    def encode_request(self, parsed: ParsedRequest, limits: RequestLimits) -> list[list[int]]:
        """The ids of every prompt of a request; prompts that are ids already stay as they are.

        Raises:
            InvalidRequest: the chat template is missing or refuses the messages, or a text is far
                too long.
        """
        if parsed.messages is not None:
            # The template has written the special tokens itself.
            encode = partial(self.encode, add_special_tokens=False)
            return [encode_bounded(self._render(parsed.messages), encode, limits)]
        return [
            encode_bounded(prompt, self.encode, limits) if isinstance(prompt, str) else list(prompt)
            for prompt in parsed.prompts
        ]

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; use /v1/completions", field="messages"
            )
        try:
            return str(
                self._template.render(
                    messages=list(messages), add_generation_prompt=True, **self._special
                )
            )
        # A template is a program of the model's makers, and fails as programs do.
        except Exception as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", field="messages"
            ) from error


def text_length(parsed: ParsedRequest) -> int:
    """Characters that have to be tokenised."""
    if parsed.messages is not None:
        return sum(len(message["content"]) for message in parsed.messages)
    return sum(len(prompt) for prompt in parsed.prompts if isinstance(prompt, str))


def needs_codec(parsed: ParsedRequest) -> bool:
    """Whether a prompt is text."""
    return parsed.messages is not None or any(isinstance(prompt, str) for prompt in parsed.prompts)


def _file(files: Mapping[str, str], name: str) -> bytes:
    try:
        return base64.b64decode(files[name], validate=True)
    except KeyError:
        raise WireError(f"{name} is missing among the tokenizer's files") from None
    except binascii.Error as error:
        raise WireError(f"{name} is not base64: {error}") from error


def _json_object(files: Mapping[str, str], name: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(_file(files, name), type=dict[str, object])
    except UNDECODABLE as error:
        raise WireError(f"{name}: {error}") from error


def _content(token: object) -> str | None:
    """A special token's text: plain, or in the long form with flags beside it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _compile(template: str) -> Template:
    """The template in the sandbox.

    A clock is not offered: the same messages must give the same ids on every process.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise WireError(f"chat_template: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML; a prompt is no HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
