"""A seeded answer that prefill begins and decode goes on with is the one of a single engine.

The model threads, the sampling and the metadata rows are the engine's own; what a transfer would
do, the test does: it copies the bytes of valid rows and of the metadata slot.
"""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry

from pdcluster_engine.legs import Leg
from pdcluster_engine.memory.metadata import MetadataTable, RankMetadata, metadata_bytes
from pdcluster_engine.memory.window import HostWindow
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.scheduling.orders import Begin, Work
from pdcluster_engine.scheduling.worker import Bounds, ModelThread
from pdcluster_engine.submission import Output, Submission
from pdcluster_engine.telemetry import Telemetry
from pdcluster_protocol.events import ComputeStopped, DecodeFinished, Event, PromptComputed
from pdcluster_protocol.ids import Key
from pdcluster_protocol.topology import Parallelism
from support.model_runs import MODELS, PagedModel, move_rows
from support.prompts import prompt
from support.sinks import Collected

TOKENS = 10
LENGTHS = (1, 63, 64, 65, 90, 130, 7)
SAMPLING = (
    SamplingParameters(temperature=0.9, seed=11),
    SamplingParameters(temperature=1.2, top_p=0.8, seed=12),
    SamplingParameters(temperature=1.5, top_k=5, seed=13),
    SamplingParameters(temperature=1.5, min_p=0.05, seed=14),
    SamplingParameters(temperature=1.0, repetition_penalty=1.4, seed=15),
    SamplingParameters(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.7, seed=16),
    SamplingParameters(
        temperature=1.3,
        top_p=0.95,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        seed=17,
        logprobs=3,
    ),
)
"""One a request; what each computes is another prompt."""


class Computer:
    """A model with its thread: everything ordered is computed at `run`."""

    def __init__(self, name: str, *, mode: str, seed: int, parallel: Parallelism | None) -> None:
        self.model = PagedModel(name, mode=mode, seed=seed, parallel=parallel)
        self.slots = memoryview(bytearray(metadata_bytes(len(LENGTHS))))
        self.pages: list[list[int]] = []
        self.sinks: list[Collected] = []
        self._ends: list[Event] = []
        self._changed = threading.Condition()
        self._thread = ModelThread(
            self.model.runner,
            self.model.loaded.tokenizer,
            metadata=RankMetadata([MetadataTable(HostWindow(self.slots), 0, len(LENGTHS))]),
            post=self._post,
            telemetry=Telemetry(CollectorRegistry()),
            bounds=Bounds(chunk_tokens=50, sequences_max=8, orders_max=8),
        )

    def _post(self, event: Event) -> None:
        if isinstance(event, PromptComputed | DecodeFinished | ComputeStopped):
            with self._changed:
                self._ends.append(event)
                self._changed.notify_all()

    def order(self, work: Work) -> None:
        """Every prompt with its own way to choose tokens."""
        for slot, (length, sampling) in enumerate(zip(LENGTHS, SAMPLING, strict=True)):
            submission = Submission(
                key=Key(slot + 1, 7),
                rid=f"r{slot}",
                token_ids=tuple(prompt(length, seed=4)),
                sampling=sampling,
                output_tokens_max=TOKENS,
                ignore_eos=True,
            )
            self.sinks.append(Collected())
            self.pages.append(self.model.take(length + TOKENS))
            leg = Leg(submission, self.sinks[-1])
            begin = Begin(submission.key, leg, work, tuple(self.pages[-1]), slot)
            assert self._thread.begin(begin)

    def run(self) -> list[list[Output]]:
        """The outputs of each order."""
        running = threading.Thread(target=self._thread.run, daemon=True)
        running.start()
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._ends) == len(LENGTHS), timeout=60)
        self._thread.shut_down()
        running.join(20)
        assert not running.is_alive()
        assert not any(isinstance(end, ComputeStopped) for end in self._ends)
        return [sink.outputs for sink in self.sinks]


def answers_of_one(name: str, *, mode: str) -> list[list[Output]]:
    alone = Computer(name, mode=mode, seed=1, parallel=None)
    alone.order(Work.ALONE)
    return alone.run()


def answers_of_a_pair(
    name: str, *, mode: str, parallel: Parallelism | None = None
) -> list[list[Output]]:
    source = Computer(name, mode=mode, seed=2, parallel=parallel)
    target = Computer(name, mode=mode, seed=3, parallel=parallel)
    source.order(Work.PREFILL)
    firsts = source.run()
    assert {1} == {len(outputs) for outputs in firsts}
    target.order(Work.DECODE)
    assert source.pages != target.pages
    target.slots[:] = source.slots
    for length, here, there in zip(LENGTHS, source.pages, target.pages, strict=True):
        move_rows(source.model, here, target.model, there, tokens=length)
    return target.run()


@pytest.mark.parametrize("name", MODELS)
def test_exact_outputs_of_a_pair_are_those_of_one_engine(name: str) -> None:
    expected = answers_of_one(name, mode="exact")
    assert {TOKENS} == {len(outputs) for outputs in expected}
    assert 3 == len(expected[-1][0].top_logprobs)
    assert expected == answers_of_a_pair(name, mode="exact")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_batching_pair_are_those_of_one_engine(name: str) -> None:
    expected, seen = (run(name, mode="batched") for run in (answers_of_one, answers_of_a_pair))
    assert [[o.token_id for o in outputs] for outputs in expected] == [
        [o.token_id for o in outputs] for outputs in seen
    ]


@pytest.mark.parametrize("name", ["tiny-glm", "tiny-qwen"])
def test_outputs_over_several_ranks_a_side_are_those_of_one_engine(name: str) -> None:
    parallel = Parallelism(tp=2, pp=2)
    assert answers_of_one(name, mode="exact") == answers_of_a_pair(
        name, mode="exact", parallel=parallel
    )


def test_these_answers_are_drawn_and_not_the_likeliest() -> None:
    """Else the seeds would prove nothing."""
    answers = answers_of_one("tiny-llama", mode="exact")
    likeliest = PagedModel("tiny-llama")
    for length, outputs in zip(LENGTHS, answers, strict=True):
        ids = prompt(length, seed=4)
        pages = likeliest.take(length + TOKENS)
        first = likeliest.prefill(pages, ids, chunk=50)
        greedy = likeliest.decode(pages, length, first, tokens=TOKENS)
        assert [int(x.argmax()) for x in greedy] != [output.token_id for output in outputs]
