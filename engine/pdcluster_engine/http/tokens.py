r"""Names of single tokens for log probabilities: exact, also where a token is no whole character.

A token that is part of a character has no text. OpenAI writes it `bytes:\xe4\xbd` and so do we;
its bytes come from the tokenizer's own vocabulary (byte-level letters, or `<0xE4>`).
"""

from __future__ import annotations

import functools
import re

import msgspec

from pdcluster_engine.text import TextCodec

NAMES_MAX = 16384
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenName(msgspec.Struct, frozen=True):
    """A token as text, and its bytes where they are known."""

    text: str
    raw: tuple[int, ...] | None


class TokenNames:
    """The names of a tokenizer's tokens, remembered up to a bound."""

    __slots__ = ("_codec", "name")

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.name = functools.lru_cache(maxsize=NAMES_MAX)(self._name)

    def _name(self, token_id: int) -> TokenName:
        text = self._codec.token_text(token_id)
        if REPLACEMENT not in text:
            return TokenName(text, tuple(text.encode()))
        raw = vocabulary_bytes(self._codec.tokenizer.id_to_token(token_id))
        if raw is None:
            return TokenName(text, None)
        try:
            return TokenName(raw.decode(), tuple(raw))
        except UnicodeDecodeError:
            return TokenName("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), tuple(raw))


def vocabulary_bytes(entry: str | None) -> bytes | None:
    """The bytes behind a vocabulary entry of a byte-level tokenizer; None if it is none."""
    if entry is None:
        return None
    single = _BYTE_TOKEN.fullmatch(entry)
    if single is not None:
        return bytes([int(single[1], 16)])
    letters = _byte_letters()
    if not all(letter in letters for letter in entry):
        return None
    return bytes(letters[letter] for letter in entry)


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes every byte as one visible letter: itself, or from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
