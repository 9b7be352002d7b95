"""An engine that plays scripts: the seam of `submission.Engine` without a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdcluster_engine.http import build_app, serve
from pdcluster_engine.submission import (
    EngineState,
    FinishReason,
    Output,
    OutputSink,
    Submission,
)
from pdcluster_engine.text import Detokenizer, TextCodec, TextConfig
from pdcluster_protocol.authentication import KeyRing
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import PDClusterError, Reason
from pdcluster_protocol.ids import Key, Role
from pdcluster_protocol.messages import Load

WAIT_SECONDS = 20.0
"""No test waits longer for anything."""
CONFIG = EngineConfig(
    cluster="test",
    instance="test-decode-0",
    role=Role.DECODE,
    host="127.0.0.1",
    link_path="",
    keys_folder="",
    model_source="builtin://scripted",
    served_name="tiny",
    max_context=256,
)
AUTHORITY = f"{CONFIG.host}:{CONFIG.http_port}"
"""Its configured name, which every engine here takes beside the port that it really has."""
RING = KeyRing({"k1": b"0123456789abcdef0123456789abcdef"})


class Fail(msgspec.Struct, frozen=True):
    """The script ends the sequence badly."""

    reason: Reason
    detail: str


Step = Output | Fail | threading.Event
"""An event is waited for; a cancel sets it."""
Script = Callable[[Submission], Sequence[Step]]


class Played(threading.Thread):
    """One submission and its script, on a thread of its own as in the real engine."""

    def __init__(self, submission: Submission, sink: OutputSink, steps: Sequence[Step]) -> None:
        super().__init__(daemon=True)
        self.submission = submission
        self.cancelled: tuple[Reason, str] | None = None
        self._sink = sink
        self._steps = steps

    def cancel(self, reason: Reason, detail: str) -> None:
        if self.cancelled is None:
            self.cancelled = (reason, detail)
        for step in self._steps:
            if isinstance(step, threading.Event):
                step.set()

    def run(self) -> None:
        for step in self._steps:
            if isinstance(step, threading.Event):
                assert step.wait(WAIT_SECONDS), "a script waited in vain"
            if self.cancelled is not None:
                self._sink.failed(*self.cancelled)
                return
            if isinstance(step, Fail):
                self._sink.failed(step.reason, step.detail)
                return
            if isinstance(step, Output):
                self._sink.emit(step)
        self._sink.finished()


class ScriptedEngine:
    """Records what it is asked for and answers by script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._changed = threading.Condition()
        self.played: list[Played] = []
        self.refusal: PDClusterError | None = None
        self.ready = True
        self.joined = True
        self.loops = 0

    @property
    def submissions(self) -> list[Submission]:
        return [played.submission for played in self.played]

    def submit(self, submission: Submission, sink: OutputSink) -> None:
        if self.refusal is not None:
            raise self.refusal
        played = Played(submission, sink, self._script(submission))
        with self._changed:
            self.played.append(played)
            self._changed.notify_all()
        played.start()

    def cancel(self, key: Key, reason: Reason, detail: str = "") -> None:
        for played in self.played:
            if played.submission.key == key:
                self._cancel(played, reason, detail)

    def cancel_rid(self, rid: str, reason: Reason) -> bool:
        found = [played for played in self.played if played.submission.rid == rid]
        for played in found:
            self._cancel(played, reason, "by rid")
        return bool(found)

    def state(self) -> EngineState:
        self.loops += 1
        load = Load(pages_free=30, pages_total=40, pages_quarantined=1, rooms_open=2, queued=3)
        return EngineState(self.ready, self.joined, self.loops, load, "incarnation-1")

    def wait_for_cancels(self, count: int) -> list[Reason]:
        """The reasons of so many cancelled sequences."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._cancels()) >= count, WAIT_SECONDS)
            return self._cancels()

    def wait_for_submissions(self, count: int) -> None:
        """Until so many sequences have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.played) >= count, WAIT_SECONDS)

    def cancelled_rids(self) -> list[str]:
        """The names of all cancelled sequences, in order of their coming."""
        return [p.submission.rid for p in self.played if p.cancelled is not None]

    def _cancels(self) -> list[Reason]:
        return [played.cancelled[0] for played in self.played if played.cancelled is not None]

    def _cancel(self, played: Played, reason: Reason, detail: str) -> None:
        with self._changed:
            played.cancel(reason, detail)
            self._changed.notify_all()


def byte_codec() -> TextCodec:
    """One token a byte, `<|end|>` above them, and a chat template that shows its input."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    return TextCodec(tokenizer, TextConfig(chat_template=template))


CODEC = byte_codec()


def spell(text: str, submission: Submission, *, ends: bool = False) -> list[Step]:
    """The outputs of a model that says `text`: stop strings and the token bound are obeyed.

    Token i has logprob -(i + 1) / 3 as float32, and as many alternatives as asked.
    """
    ids = CODEC.encode(text)
    detokenizer = Detokenizer(CODEC, stop=submission.stop_strings)
    steps: list[Step] = []
    for index, token_id in enumerate(ids[: submission.output_tokens_max]):
        piece = detokenizer.push(token_id)
        last = index + 1 == submission.output_tokens_max
        finish = FinishReason.LENGTH if last else None
        if detokenizer.stopped is not None or (ends and index + 1 == len(ids)):
            finish = FinishReason.STOP
        if finish is not None:
            piece += detokenizer.finish()
        steps.append(
            Output(
                token_id=token_id,
                text=piece,
                logprob=logprob(index),
                top_logprobs=tuple(
                    (other, logprob(index + other))
                    for other in range(submission.sampling.logprobs or 0)
                ),
                finish=finish,
                stop=detokenizer.stopped,
            )
        )
        if finish is not None:
            break
    return steps


def logprob(index: int) -> float:
    """A float32 that has no short decimal."""
    cell = memoryview(bytearray(4)).cast("f")
    cell[0] = -(index + 1) / 3
    return cell[0]


@contextlib.asynccontextmanager
async def serving(
    engine: ScriptedEngine,
    *,
    config: EngineConfig = CONFIG,
    ring: KeyRing | None = RING,
) -> AsyncIterator[str]:
    """The HTTP side over an engine on a free port; yields its address."""
    app: web.Application = build_app(engine, CODEC, config, ring, registry=CollectorRegistry())
    runner = await serve(app, "127.0.0.1", 0)
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
