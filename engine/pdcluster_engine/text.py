"""Text in and out: token ids, chat templates, and text that is safe to send.

Both legs and the router must see the same ids, so all of them work with the very files that
`TextCodec.files` returns, and `digest` names them in the fingerprint.

A stream of tokens is not a stream of characters: a character may span tokens, and a stop string
may span both. `Detokenizer` holds back exactly what could still turn out to be the beginning of a
stop string or the middle of a character.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pdcluster_protocol.errors import ConfigError, InvalidRequest
from pdcluster_protocol.undecodable import UNDECODABLE

BROKEN_RUN_TOKENS = 32
"""So many tokens without a whole character are not waiting for one."""


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the tokenizer: the fields of `tokenizer_config.json` that we use."""

    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class TextCodec:
    """A raw tokenizer, its chat template and its special tokens."""

    def __init__(self, tokenizer: Tokenizer, config: TextConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._template = _compile(config.chat_template)

    @property
    def vocab_size(self) -> int:
        """Ids below this decode to something."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; of a rendered chat without special tokens, which the template wrote.

        The batch call is the one that releases the interpreter lock, which a long prompt would
        otherwise hold for its whole length.
        """
        batch = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(batch[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; unknown ids are nothing, broken UTF-8 is U+FFFD."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token alone, special ones by name: for logprobs."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None."""
        found = self.tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; use /v1/completions", field="messages"
            )
        special = {
            name: token
            for name, token in msgspec.structs.asdict(self.config).items()
            if name != "chat_template" and token is not None
        }
        try:
            return str(
                self._template.render(
                    messages=list(messages), add_generation_prompt=add_generation_prompt, **special
                )
            )
        # A template is a program of the model's makers, and fails as programs do.
        except Exception as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", field="messages"
            ) from error

    def files(self) -> dict[str, bytes]:
        """`tokenizer.json` and `tokenizer_config.json`: all that another process needs."""
        return {
            "tokenizer.json": str(self.tokenizer.to_str()).encode(),
            "tokenizer_config.json": msgspec.json.encode(self.config),
        }

    def digest(self) -> str:
        """16 hex digits over `files`."""
        total = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            total.update(f"{name} {len(content)}\n".encode() + content)
        return total.hexdigest()[:16]

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> TextCodec:
        """The codec that `files` describes.

        Raises:
            ConfigError: naming the file that is missing or broken.
        """
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if name not in files:
                raise ConfigError(f"{name} is missing among the tokenizer's files")
        try:
            config = msgspec.json.decode(files["tokenizer_config.json"], type=TextConfig)
        except UNDECODABLE as error:
            raise ConfigError(f"tokenizer_config.json: {error}") from error
        try:
            tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        # The library raises plain Exception for a broken file.
        except Exception as error:
            raise ConfigError(f"tokenizer.json: {error}") from error
        return cls(tokenizer, config)


class Detokenizer:
    """Incremental text of one sequence.

    With stop strings, text before the first completed one is emitted, the stop string and all
    behind it never. The first is the one that ends first (of those the longest), so the result
    does not depend on how the text was cut into tokens.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`prompt_ids`: the last tokens before the output, for tokenizers that look back."""
        if "" in stop:
            raise InvalidRequest("stop: an empty string stops nothing; remove it", field="stop")
        self.stopped: str | None = None
        self._codec = codec
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(list(prompt_ids), skip_special_tokens=skip_special_tokens)
        self._unfinished: list[int] = []
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take a token; return the text that may be sent now. After a stop there is none."""
        if self.stopped is not None:
            return ""
        text = self._step(token_id) or self._broken_head()
        return self._release(text)

    def finish(self) -> str:
        """The rest at the end of the sequence: an unfinished character, a stop that never came."""
        if self.stopped is not None:
            return ""
        tail = self._decode(self._unfinished)
        self._unfinished.clear()
        text = self._release(tail)
        if self.stopped is not None:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _step(self, token_id: int) -> str:
        text = self._stream.step(self._codec.tokenizer, token_id)
        if text is None:
            self._unfinished.append(token_id)
            return ""
        self._unfinished.clear()
        return str(text)

    def _broken_head(self) -> str:
        """What a long run without a whole character certainly is: broken, and not to be held on to.

        Without this, a model that repeats half a character would send nothing until its end, and
        every token would decode the whole run again. The last tokens may still become a character,
        so the run is cut before them, and only where the cut changes no text.
        """
        run = self._unfinished
        if len(run) < BROKEN_RUN_TOKENS:
            return ""
        whole = self._decode(run)
        for kept in range(4, 8):
            head, tail = self._decode(run[:-kept]), run[-kept:]
            if head + self._decode(tail) == whole:
                self._unfinished = []
                self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
                return head + "".join([self._step(token) for token in tail])
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _release(self, text: str) -> str:
        self._held += text
        found = self._first_stop()
        if found is not None:
            start, self.stopped = found
            before, self._held = self._held[:start], ""
            return before
        keep = self._held_back()
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def _first_stop(self) -> tuple[int, str] | None:
        """(start, stop) of the stop string that ends first in the held text."""
        found = [(self._held.find(stop), stop) for stop in self._stop]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _held_back(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def _compile(template: str | None) -> Template | None:
    """The template in the sandbox, with what the library's own renderer offers to templates.

    A clock is not offered: the same messages must give the same ids on every process.
    """
    if template is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat_template, line {error.lineno}: {error.message}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML; a prompt is no HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)
