"""The model thread over a runner that counts: turns, ends, stops and failures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from pdcluster_engine.legs import Leg
from pdcluster_engine.memory.metadata import (
    MetadataRow,
    MetadataTable,
    RankMetadata,
    metadata_bytes,
)
from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.model.builtin import END_ID, byte_codec
from pdcluster_engine.model.port import DecodeRow, Written
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.scheduling.orders import Begin, Work
from pdcluster_engine.scheduling.worker import Bounds, ModelThread
from pdcluster_engine.submission import FinishReason, Submission
from pdcluster_engine.telemetry import Telemetry
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.events import (
    ComputeStopped,
    DecodeFinished,
    Event,
    PromptComputed,
    RowsWritten,
)
from pdcluster_protocol.ids import Key
from pdcluster_protocol.layout import KVLayout, Region
from support.sinks import Collected

CODEC = byte_codec()
SLOTS = 4
POISON = 250
"""A token that the runner below cannot compute."""


class CountingRunner:
    """The token after t is t + 1; says what it was asked."""

    def __init__(self) -> None:
        self.layout = KVLayout(4, "float32", (Region(0, "key", 4), Region(0, "value", 4)))
        self.vocab_size = CODEC.vocab_size
        self.eos_ids = frozenset({END_ID})
        self.max_context = 1000
        self.calls: list[Any] = []
        self.gate: threading.Semaphore | None = None
        self.entered = threading.Semaphore(0)

    def attach(self, arena: object, page_count: int) -> None: ...

    def prefill(
        self,
        pages: Sequence[int],
        token_ids: Sequence[int],
        start: int,
        end: int,
        written: Written,
    ) -> torch.Tensor:
        self.calls.append((pages[0], start, end))
        self._wait()
        if POISON in token_ids[start:end]:
            raise RuntimeError("poisoned chunk")
        for region in range(len(self.layout.regions)):
            written(region, start, end)
        return self._after(token_ids[end - 1])

    def decode(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        self.calls.append(tuple((row.pages[0], row.length) for row in rows))
        self._wait()
        if POISON in [row.token_id for row in rows]:
            raise RuntimeError("poisoned step")
        return torch.stack([self._after(row.token_id) for row in rows])

    def _wait(self) -> None:
        if self.gate is not None:
            self.entered.release()
            assert self.gate.acquire(timeout=20)

    def _after(self, token_id: int) -> torch.Tensor:
        logits = torch.zeros(self.vocab_size)
        logits[token_id + 1] = 9.0
        return logits


class Bench:
    """A model thread, its orders and what comes of them."""

    def __init__(self, *, sequences_max: int = 8, chunk_tokens: int = 4) -> None:
        self.runner = CountingRunner()
        self.events: list[Event] = []
        self.changed = threading.Condition()
        memory = memoryview(bytearray(metadata_bytes(SLOTS)))
        self.metadata = RankMetadata([MetadataTable(HostWindow(memory), 0, SLOTS)])
        self.registry = CollectorRegistry()
        self.thread = ModelThread(
            self.runner,
            CODEC,
            metadata=self.metadata,
            post=self._post,
            telemetry=Telemetry(self.registry),
            bounds=Bounds(chunk_tokens=chunk_tokens, sequences_max=sequences_max, orders_max=8),
        )
        self.running: threading.Thread | None = None

    def _post(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def begin(self, work: Work, prompt: str | list[int], **changes: object) -> Collected:
        """Order a computation whose first page is its room's number."""
        ids = tuple(CODEC.encode(prompt) if isinstance(prompt, str) else prompt)
        room = int(str(changes.pop("room", 1)))
        slot = changes.pop("slot", None)
        pages = tuple(range(room, room + int(str(changes.pop("pages", 20)))))
        values: dict[str, object] = {
            "key": Key(room, 7),
            "rid": f"r{room}",
            "token_ids": ids,
            "sampling": SamplingParameters(temperature=0.0),
            "output_tokens_max": 5,
        }
        submission = Submission(**{**values, **changes})  # type: ignore[arg-type]  # by name, in tests
        sink = Collected()
        leg = Leg(submission, sink)
        order = Begin(submission.key, leg, work, pages, slot)  # type: ignore[arg-type]  # as above
        assert self.thread.begin(order)
        return sink

    def start(self) -> None:
        self.running = threading.Thread(target=self.thread.run, daemon=True)
        self.running.start()

    def run_to_end(self) -> None:
        """Everything that was ordered, then the end."""
        wanted = len(self.thread._orders)
        self.start()
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.finals()) >= wanted, timeout=20)
        self.close()

    def finals(self) -> list[Event]:
        kinds = (DecodeFinished, ComputeStopped, PromptComputed)
        return [event for event in self.events if isinstance(event, kinds)]

    def close(self) -> None:
        self.thread.shut_down()
        assert self.running is not None
        self.running.join(20)
        assert not self.running.is_alive()


def letters(text: str) -> list[int]:
    return CODEC.encode(text)


def test_alone_computes_in_chunks_and_then_one_token_a_step() -> None:
    bench = Bench()
    ids = list(range(65, 75))
    sink = bench.begin(Work.ALONE, ids)
    bench.run_to_end()
    assert [(1, 0, 4), (1, 4, 8), (1, 8, 10)] == bench.runner.calls[:3]
    assert [((1, 10 + step),) for step in range(4)] == bench.runner.calls[3:]
    assert [75, 76, 77, 78, 79] == sink.token_ids
    assert CODEC.decode([75, 76, 77, 78, 79]) == sink.text
    assert FinishReason.LENGTH is sink.outputs[-1].finish
    assert [DecodeFinished(Key(1, 7))] == bench.events
    assert 10 == bench.registry.get_sample_value("pdcluster_prompt_tokens_computed_total")
    assert 5 == bench.registry.get_sample_value("pdcluster_tokens_generated_total")


def test_prefill_reports_all_rows_then_leaves_its_token_in_the_slot() -> None:
    bench = Bench()
    sampling = SamplingParameters(temperature=0.0, logprobs=2)
    sink = bench.begin(Work.PREFILL, list(range(60, 66)), slot=3, sampling=sampling)
    bench.run_to_end()
    key = Key(1, 7)
    chunks = [RowsWritten(key, region, *c) for c in ((0, 4), (4, 6)) for region in (0, 1)]
    assert [*chunks, PromptComputed(key)] == bench.events
    row = bench.metadata.read(3)
    (output,) = sink.outputs
    assert (66, 1) == (row.token, row.room)
    assert (output.logprob, output.top_logprobs) == (row.logprob, row.top_logprobs)
    assert 2 == len(row.top_logprobs)
    assert FinishReason.LENGTH is output.finish


def test_prompts_take_turns_and_answers_go_on_between_their_chunks() -> None:
    bench = Bench()
    bench.begin(Work.ALONE, [65], room=100)
    bench.begin(Work.PREFILL, list(range(12)), room=200)
    bench.begin(Work.PREFILL, list(range(8)), room=300)
    bench.run_to_end()
    order = [call[0][0] if isinstance(call[0], tuple) else call[0] for call in bench.runner.calls]
    assert [100, 100, 200, 100, 300, 100, 200, 100, 300, 200] == order


def test_at_most_so_many_answers_run_and_the_others_wait_in_order() -> None:
    bench = Bench(sequences_max=2)
    for room in (1, 2, 3):
        bench.metadata.write(room, MetadataRow(token=65, room=room))
        bench.begin(Work.DECODE, [64], room=room, slot=room, output_tokens_max=3)
    bench.run_to_end()
    steps = [tuple(page for page, _ in call) for call in bench.runner.calls]
    assert [(1, 2), (1, 2), (3,), (3,)] == steps
    assert [DecodeFinished(Key(room, 7)) for room in (1, 2, 3)] == bench.events


def test_decode_continues_from_the_metadata_row_without_computing_the_prompt() -> None:
    bench = Bench()
    row = MetadataRow(token=70, logprob=-0.5, top_logprobs=((70, -0.5), (3, -2.0)), room=1)
    bench.metadata.write(2, row)
    sampling = SamplingParameters(temperature=0.0, logprobs=2)
    sink = bench.begin(Work.DECODE, list(range(60, 70)), slot=2, sampling=sampling)
    bench.run_to_end()
    assert [70, 71, 72, 73, 74] == sink.token_ids
    assert (-0.5, ((70, -0.5), (3, -2.0))) == (
        sink.outputs[0].logprob,
        sink.outputs[0].top_logprobs,
    )
    assert ((1, 10),) == bench.runner.calls[0]
    assert 0 == bench.registry.get_sample_value("pdcluster_prompt_tokens_computed_total")


def test_an_answer_of_one_token_needs_no_step() -> None:
    bench = Bench()
    bench.metadata.write(0, MetadataRow(token=70, room=1))
    sink = bench.begin(Work.DECODE, [69], slot=0, output_tokens_max=1)
    bench.run_to_end()
    assert [FinishReason.LENGTH] == [output.finish for output in sink.outputs]
    assert [] == bench.runner.calls


@pytest.mark.parametrize(
    "row",
    [MetadataRow(token=70, room=99), MetadataRow(token=CODEC.vocab_size, room=1)],
    ids=["room", "token"],
)
def test_a_metadata_row_of_another_room_or_vocabulary_stops_the_key(row: MetadataRow) -> None:
    bench = Bench()
    bench.metadata.write(0, row)
    sink = bench.begin(Work.DECODE, [69], slot=0)
    bench.run_to_end()
    (event,) = bench.events
    assert isinstance(event, ComputeStopped)
    assert Reason.METADATA_CORRUPT is event.reason
    assert [] == sink.outputs


@pytest.mark.parametrize(
    ("changes", "ids", "text", "stop"),
    [
        ({"stop_strings": ("CD",)}, "ABCD", "AB", "CD"),
        ({"stop_token_ids": frozenset(letters("C"))}, "ABC", "AB", letters("C")[0]),
        ({"stop_strings": ("A",)}, "A", "", "A"),
    ],
    ids=["string", "token", "first"],
)
def test_a_stop_ends_the_answer_and_is_not_shown(
    changes: dict[str, object], ids: str, text: str, stop: str | int
) -> None:
    bench = Bench()
    before = letters("A")[0] - 1
    sink = bench.begin(Work.ALONE, [before], output_tokens_max=50, **changes)
    bench.run_to_end()
    assert letters(ids) == sink.token_ids
    assert text == sink.text
    last = sink.outputs[-1]
    assert (FinishReason.STOP, stop) == (last.finish, last.stop)


def test_the_end_token_stops_unless_it_is_to_be_ignored() -> None:
    for ignore, count in ((False, 1), (True, 4)):
        bench = Bench()
        sink = bench.begin(
            Work.ALONE, [END_ID - 1], output_tokens_max=4, ignore_eos=ignore, room=1 + ignore
        )
        bench.run_to_end()
        assert count == len(sink.outputs)
        assert (FinishReason.LENGTH if ignore else FinishReason.STOP) is sink.outputs[-1].finish


def test_an_answer_never_leaves_its_pages() -> None:
    bench = Bench()
    sink = bench.begin(Work.ALONE, list(range(5)), pages=2, output_tokens_max=500)
    bench.run_to_end()
    assert 4 == len(sink.outputs)
    assert ((1, 7),) == bench.runner.calls[-1]


def test_a_prompt_that_fails_ends_alone() -> None:
    bench = Bench()
    bench.begin(Work.ALONE, [POISON], room=1)
    good = bench.begin(Work.ALONE, [65], room=2)
    bench.run_to_end()
    assert (
        ComputeStopped(Key(1, 7), Reason.MODEL_FAILED, "RuntimeError: poisoned chunk")
        == (bench.events[0])
    )
    assert 5 == len(good.outputs)


def test_a_step_that_fails_ends_every_key_of_its_batch() -> None:
    bench = Bench()
    for room, token in ((1, 65), (2, POISON)):
        bench.metadata.write(room, MetadataRow(token=token, room=room))
        bench.begin(Work.DECODE, [64], room=room, slot=room)
    bench.run_to_end()
    detail = "RuntimeError: poisoned step"
    stopped = [ComputeStopped(Key(room, 7), Reason.MODEL_FAILED, detail) for room in (1, 2)]
    assert stopped == bench.events


def test_a_stop_takes_effect_at_the_next_chunk_and_is_always_answered() -> None:
    bench = Bench()
    bench.runner.gate = threading.Semaphore(0)
    bench.begin(Work.PREFILL, list(range(40)), slot=0)
    bench.start()
    assert bench.runner.entered.acquire(timeout=20)
    bench.thread.stop(Key(1, 7))
    bench.thread.stop(Key(55, 7))
    bench.runner.gate.release()
    with bench.changed:
        assert bench.changed.wait_for(lambda: len(bench.finals()) >= 2, timeout=20)
    bench.close()
    assert [ComputeStopped(Key(1, 7)), ComputeStopped(Key(55, 7))] == bench.finals()
    assert [(1, 0, 4)] == bench.runner.calls


def test_over_the_bound_a_computation_is_refused() -> None:
    bench = Bench()
    for room in range(1, 9):
        bench.begin(Work.ALONE, [1], room=room)
    submission = Submission(
        key=Key(9, 1), rid="r", token_ids=(1,), sampling=SamplingParameters(), output_tokens_max=1
    )
    leg = Leg(submission, Collected())
    assert not bench.thread.begin(Begin(Key(9, 1), leg, Work.ALONE, (1,), None))
