"""Ids, chat templates and text that is safe to send."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_engine.model.builtin import END_ID, VOCAB_SIZE, byte_codec
from pdcluster_engine.text import BROKEN_RUN_TOKENS, Detokenizer, TextCodec, TextConfig
from pdcluster_protocol.errors import ConfigError, InvalidRequest

CODEC = byte_codec()
HEART = "❤".encode()


def ids_of(raw: bytes) -> list[int]:
    """Any bytes as ids, also those that are no text: a byte's id is found in a text that has it."""
    letters = {}
    for number in range(256):
        token = CODEC.tokenizer.id_to_token(number)
        letters[token] = number
    table = _byte_letters()
    return [letters[table[byte]] for byte in raw]


def _byte_letters() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def reference(text: str, stops: list[str]) -> str:
    """Up to the stop string that ends first; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(len(stop) for stop in matching)]
    return text


def test_a_text_of_ascii_has_one_token_a_character_and_comes_back() -> None:
    text = "Hello, world: 1 + 1 = 2!\n\t"
    assert len(text) == len(CODEC.encode(text))
    assert text == CODEC.decode(CODEC.encode(text))
    assert "日本 ❤ é" == CODEC.decode(CODEC.encode("日本 ❤ é"))


def test_every_id_below_the_vocabulary_decodes_to_something() -> None:
    assert VOCAB_SIZE == CODEC.vocab_size
    assert all(CODEC.token_text(token_id) for token_id in range(VOCAB_SIZE))
    assert "<|endoftext|>" == CODEC.token_text(END_ID)
    assert "" == CODEC.decode([END_ID])
    assert END_ID == CODEC.token_id("<|endoftext|>")
    assert None is CODEC.token_id("<|unheard|>")


def test_a_chat_is_rendered_by_the_template_and_special_tokens_are_single_ids() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert "[gMASK]<sop><|user|>\nHi<|assistant|>\n" == CODEC.render_chat(messages)
    assert "[gMASK]<sop><|user|>\nHi" == CODEC.render_chat(messages, add_generation_prompt=False)
    rendered = CODEC.encode(CODEC.render_chat(messages), add_special_tokens=False)
    assert 4 + len("\nHi\n") == len(rendered)


def test_a_template_runs_in_a_sandbox_and_may_refuse() -> None:
    def render(template: str) -> str:
        return TextCodec(CODEC.tokenizer, TextConfig(chat_template=template)).render_chat([])

    with pytest.raises(InvalidRequest, match="access to attribute '__class__'"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="by zero"):
        render("{{ 1 // 0 }}")
    assert '{"a": "<ä>"}' == render("{{ {'a': '<ä>'} | tojson }}")
    with pytest.raises(ConfigError, match="chat_template, line 1"):
        render("{% if %}")
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec(CODEC.tokenizer, TextConfig()).render_chat([])


def test_the_files_make_an_equal_codec_and_the_digest_names_them() -> None:
    again = TextCodec.from_files(CODEC.files())
    assert CODEC.digest() == again.digest()
    assert CODEC.encode("a<|user|>ß") == again.encode("a<|user|>ß")
    other = TextCodec(CODEC.tokenizer, TextConfig(eos_token="<|endoftext|>"))
    assert CODEC.digest() != other.digest()


def test_missing_or_broken_files_are_refused_by_name() -> None:
    files = CODEC.files()
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is missing"):
        TextCodec.from_files({"tokenizer.json": files["tokenizer.json"]})
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        TextCodec.from_files({**files, "tokenizer.json": b"{}"})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: "):
        TextCodec.from_files({**files, "tokenizer_config.json": b"[]"})


def test_a_character_comes_when_its_last_byte_has_come() -> None:
    detokenizer = Detokenizer(CODEC)
    assert ["", "", "❤", "!"] == [detokenizer.push(token) for token in ids_of(HEART + b"!")]
    assert "" == detokenizer.finish()


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    detokenizer = Detokenizer(CODEC)
    assert ["", ""] == [detokenizer.push(token) for token in ids_of(HEART[:2])]
    assert "\ufffd" == detokenizer.finish()


def test_special_tokens_are_silent_unless_asked_for() -> None:
    quiet, loud = Detokenizer(CODEC), Detokenizer(CODEC, skip_special_tokens=False)
    assert "" == quiet.push(END_ID) + quiet.finish()
    assert "<|endoftext|>" == loud.push(END_ID) + loud.finish()


def test_a_stop_string_is_held_back_until_it_cannot_match() -> None:
    detokenizer = Detokenizer(CODEC, stop=["END"])
    pushed = [detokenizer.push(token) for token in CODEC.encode("aENxEND more")]
    assert ["a", "", "", "ENx", "", "", ""] == pushed[:7]
    assert "" == "".join(pushed[7:]) + detokenizer.finish()
    assert "END" == detokenizer.stopped


def test_the_beginning_of_a_stop_string_at_the_end_is_text() -> None:
    detokenizer = Detokenizer(CODEC, stop=["END"])
    assert "x" == "".join(detokenizer.push(token) for token in CODEC.encode("xEN"))
    assert "EN" == detokenizer.finish()
    assert None is detokenizer.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        Detokenizer(CODEC, stop=["a", ""])


def test_a_long_run_of_broken_bytes_is_sent_and_not_kept() -> None:
    raw = b"\x80" * 500 + HEART[:2]
    detokenizer = Detokenizer(CODEC)
    sent = ""
    for count, token in enumerate(ids_of(raw), start=1):
        sent += detokenizer.push(token)
        assert count - len(sent) <= BROKEN_RUN_TOKENS
    sent += detokenizer.push(ids_of(HEART[2:])[0]) + detokenizer.finish()
    assert "\ufffd" * 500 + "❤" == sent


@settings(max_examples=150, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_stop_strings_cut_as_if_the_text_were_known_whole(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(CODEC, stop=stops)
    sent = "".join(detokenizer.push(token) for token in CODEC.encode(text)) + detokenizer.finish()
    assert reference(text, stops) == sent
    assert (sent != text) == (detokenizer.stopped is not None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=150))
def test_the_pieces_of_any_ids_are_the_text_of_all(ids: list[int]) -> None:
    detokenizer = Detokenizer(CODEC)
    assert CODEC.decode(ids) == "".join(map(detokenizer.push, ids)) + detokenizer.finish()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200).map(lambda raw: bytes(byte | 0x80 for byte in raw)))
def test_the_pieces_of_bytes_that_are_no_text_are_the_text_of_all(raw: bytes) -> None:
    ids = ids_of(raw)
    detokenizer = Detokenizer(CODEC)
    expected = raw.decode("utf-8", "replace")
    assert expected == "".join(map(detokenizer.push, ids)) + detokenizer.finish()
