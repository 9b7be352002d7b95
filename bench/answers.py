"""One measured request: when each event of its stream arrived, and the text, to compare."""

from __future__ import annotations

import random
import string
import time

import msgspec

from pdctl.asking import DONE, Completion
from pdctl.web import exchange, stream

ANSWER_SECONDS = 60.0
NANOSECONDS = 1_000_000_000


class Timed(msgspec.Struct, frozen=True):
    """A streamed answer with its times, all in seconds."""

    sent_at: float
    """Unix time, to lay it beside logs."""
    first_token: float
    """From sending to the first event."""
    last_token: float
    """From sending to the last token's event."""
    tokens: int
    text: str

    @property
    def per_token(self) -> float:
        """Mean time between tokens, the first one not counted."""
        return (self.last_token - self.first_token) / max(1, self.tokens - 1)


def prompt_text(tokens: int, seed: int) -> str:
    """A text of so many tokens: the built-in models have one per byte."""
    return "".join(random.Random(seed).choices(string.ascii_letters + " ", k=tokens))


def body(model: str, prompt: str, max_tokens: int) -> dict[str, object]:
    """A greedy completion of exactly `max_tokens` tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def ask(url: str, asked: dict[str, object]) -> Timed:
    """Stream one completion.

    Raises:
        PDClusterError: an error answer.
        RuntimeError: an error inside the stream, or fewer tokens than asked for.
    """
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    sent_at, started = time.time_ns() / NANOSECONDS, time.monotonic()
    events: list[tuple[float, bytes]] = []
    for event in stream(f"{url}/v1/completions", streamed, timeout_seconds=ANSWER_SECONDS):
        events.append((time.monotonic() - started, event))
        if event == DONE:
            break
    # Decoded afterwards, so that it takes no time between two events.
    pieces = [
        (at, msgspec.json.decode(event, type=Completion)) for at, event in events if event != DONE
    ]
    usage = next((piece.usage for _, piece in pieces if piece.usage is not None), None)
    times = [at for at, piece in pieces if piece.choices]
    if usage is None or usage.completion_tokens != asked["max_tokens"]:
        message = f"{url} answered {pieces[-1:] or 'nothing'}, not {asked['max_tokens']} tokens"
        raise RuntimeError(message)
    text = "".join(piece.choices[0].text for _, piece in pieces if piece.choices)
    return Timed(sent_at, times[0], times[-1], usage.completion_tokens, text)


def ask_whole(url: str, asked: dict[str, object]) -> str:
    """One completion, not streamed; its text.

    Raises:
        RuntimeError: an error answer.
    """
    answer = exchange("POST", f"{url}/v1/completions", asked, timeout_seconds=ANSWER_SECONDS)
    if answer.status != 200:
        message = f"{url} answered {answer.status}: {answer.message()}"
        raise RuntimeError(message)
    return msgspec.json.decode(answer.body, type=Completion).choices[0].text
