"""Two whole engines in one process, a relay between them: the same tokens as one alone."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdcluster_engine.assembly import Assembly, assemble
from pdcluster_engine.model.loading import load_runner
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.submission import FinishReason, Submission
from pdcluster_engine.telemetry import Telemetry
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import Reason, RequestFailed
from pdcluster_protocol.ids import Key, RankAddress, Role, mint_attempt
from support.ports import transfer_ports
from support.relay import Port, Relay
from support.sinks import Collected

BOOTSTRAP = RankAddress("127.0.0.1", 8998)
DECODE_ADDRESS = RankAddress("127.0.0.1", 9100)


class Running:
    """One engine's threads, started and ended by a test."""

    def __init__(self, config: EngineConfig) -> None:
        model = load_runner(config.model_source, dtype="auto", mode=config.mode, threads=1)
        self.registry = CollectorRegistry()
        self.parts: Assembly = assemble(config, model, telemetry=Telemetry(self.registry))
        self.bytes_per_token = model.layout.bytes_per_token
        self.threads = [
            threading.Thread(target=self.parts.loop.run, daemon=True),
            threading.Thread(target=self.parts.compute.run, daemon=True),
        ]
        for thread in self.threads:
            thread.start()
        self.parts.loop.open_link()

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def run(self, submission: Submission) -> Collected:
        sink = Collected()
        self.parts.engine.submit(submission, sink)
        return sink

    def close(self) -> None:
        self.parts.compute.shut_down()
        self.parts.loop.stop()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        self.parts.inbox.close()


class Pair:
    """A prefill and a decode engine that can reach each other."""

    def __init__(self, folder: str, *, transport: str, model: str, mode: str) -> None:
        self.prefill_port = Port(f"{folder}/p", incarnation="inc-p", address=BOOTSTRAP)
        self.decode_port = Port(f"{folder}/d", incarnation="inc-d", address=DECODE_ADDRESS)
        self.relay = Relay(
            {BOOTSTRAP: self.prefill_port, RankAddress("127.0.0.1", 8999): self.decode_port}
        )
        self.relay.__enter__()
        shared = {"transport": transport, "model_source": model, "mode": mode}
        self.prefill = Running(_config(folder, Role.PREFILL, **shared))
        self.decode = Running(_config(folder, Role.DECODE, **shared))
        self.relay.wait_joined()
        self._random = random.Random(5)

    def submission(self, prompt: tuple[int, ...], **changes: object) -> Submission:
        """A greedy leg under a fresh key; `bootstrap` makes it one of a pair."""
        room = self._random.randrange(1, 1 << 62)
        values: dict[str, object] = {
            "key": Key(room, mint_attempt(1_700_000_000_000, self._random.getrandbits(22))),
            "rid": f"rid-{room}",
            "token_ids": prompt,
            "sampling": SamplingParameters(temperature=0.0, logprobs=3),
            "output_tokens_max": 12,
            "bootstrap": BOOTSTRAP,
            "ignore_eos": True,
        }
        return Submission(**{**values, **changes})  # type: ignore[arg-type]  # by name, in tests

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.relay.__exit__(None, None, None)


def _config(folder: str, role: Role, **settings: Any) -> EngineConfig:
    letter = role.value[0]
    return EngineConfig(
        cluster="test",
        instance=f"test-{role}-0",
        role=role,
        host="127.0.0.1",
        link_path=f"{folder}/{letter}",
        keys_folder=folder,
        served_name="tiny",
        max_context=1024,
        chunk=48,
        **transfer_ports(),
        scatter_seed=11 if role is Role.PREFILL else 12,
        **settings,
    )


SETTINGS = [
    ("local", "tiny-llama", "exact"),
    ("mooncake", "tiny-glm", "exact"),
    ("mooncake", "tiny-llama", "batched"),
]


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    transport, model, mode = request.param
    with tempfile.TemporaryDirectory() as folder:
        running = Pair(folder, transport=transport, model=f"builtin://{model}", mode=mode)
        yield running
        running.close()


def _prompt(length: int) -> tuple[int, ...]:
    generator = random.Random(length)
    return tuple(generator.randrange(256) for _ in range(length))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 300])
def test_a_pair_gives_the_same_tokens_and_logprobs_as_one_engine(pair: Pair, length: int) -> None:
    prompt = _prompt(length)
    alone = pair.decode.run(pair.submission(prompt, bootstrap=None))
    assert (None, "") == alone.end()
    leg = pair.submission(prompt)
    first, second = pair.prefill.run(leg), pair.decode.run(leg)
    assert (None, "") == second.end()
    assert (None, "") == first.end()
    assert alone.outputs == second.outputs
    assert [FinishReason.LENGTH] == [output.finish for output in first.outputs]
    assert alone.token_ids[:1] == first.token_ids


def test_a_seeded_draw_with_penalties_and_a_stop_is_the_same_in_two_processes(pair: Pair) -> None:
    sampling = SamplingParameters(
        temperature=0.9, top_p=0.9, seed=42, repetition_penalty=1.1, frequency_penalty=0.3
    )
    prompt = _prompt(70)
    free = pair.decode.run(pair.submission(prompt, bootstrap=None, sampling=sampling))
    free.end()
    # Whatever the fourth token is, it ends the answer there, at its first occurrence.
    stop = frozenset({free.token_ids[3]})
    count = free.token_ids.index(free.token_ids[3]) + 1
    leg = pair.submission(prompt, sampling=sampling, stop_token_ids=stop)
    first, second = pair.prefill.run(leg), pair.decode.run(leg)
    assert [(None, "")] * 2 == [first.end(), second.end()]
    assert free.token_ids[:count] == second.token_ids
    assert FinishReason.STOP is second.outputs[-1].finish


def test_decode_computes_no_prompt_token_and_all_bytes_are_counted(pair: Pair) -> None:
    before = pair.prefill.value("pdcluster_kv_bytes_total", kind="kv")
    computed = pair.decode.value("pdcluster_prompt_tokens_computed_total")
    leg = pair.submission(_prompt(100))
    first, second = pair.prefill.run(leg), pair.decode.run(leg)
    assert [(None, "")] * 2 == [first.end(), second.end()]
    moved = pair.prefill.value("pdcluster_kv_bytes_total", kind="kv") - before
    assert 100 * pair.prefill.bytes_per_token == moved
    assert computed == pair.decode.value("pdcluster_prompt_tokens_computed_total")


def test_many_at_once_end_well_and_give_all_pages_back(pair: Pair) -> None:
    total = pair.decode.parts.engine.state().load.pages_total
    legs = [pair.submission(_prompt(20 + 17 * index)) for index in range(8)]
    runs = [(pair.prefill.run(leg), pair.decode.run(leg)) for leg in legs]
    assert [(None, "")] * 16 == [run.end() for both in runs for run in both]
    for leg, (_, second) in zip(legs, runs, strict=True):
        alone = pair.prefill.run(pair.submission(leg.token_ids, bootstrap=None))
        alone.end()
        assert alone.token_ids == second.token_ids
    pair.relay.wait_load(pair.decode_port, pages_free=total)
    pair.relay.wait_load(pair.prefill_port, pages_free=total)


def test_a_cancel_ends_both_legs_and_gives_all_pages_back(pair: Pair) -> None:
    total = pair.decode.parts.engine.state().load.pages_total
    leg = pair.submission(_prompt(64), output_tokens_max=900)
    first, second = pair.prefill.run(leg), pair.decode.run(leg)
    second.wait_outputs(3)
    pair.relay.cancel(pair.decode_port, leg.rid)
    pair.decode.parts.engine.cancel(Key(leg.key.room, 1), Reason.ABORTED)
    assert Reason.ABORTED is second.end()[0]
    assert (None, "") == first.end()
    pair.relay.wait_load(pair.decode_port, pages_free=total)
    pair.relay.wait_load(pair.prefill_port, pages_free=total)


def test_a_cancel_before_prefill_has_its_partner_frees_everything(pair: Pair) -> None:
    total = pair.prefill.parts.engine.state().load.pages_total
    leg = pair.submission(_prompt(64))
    first = pair.prefill.run(leg)
    assert pair.prefill.parts.engine.cancel_rid(leg.rid, Reason.CLIENT_GONE)
    assert Reason.CLIENT_GONE is first.end()[0]
    pair.relay.wait_load(pair.prefill_port, pages_free=total)


def test_a_live_room_and_a_live_rid_are_refused_at_once(pair: Pair) -> None:
    leg = pair.submission(_prompt(10), output_tokens_max=900, bootstrap=None)
    run = pair.decode.run(leg)
    with pytest.raises(RequestFailed) as room:
        pair.decode.run(pair.submission(_prompt(10), key=leg.key))
    assert Reason.ROOM_IN_USE is room.value.reason
    with pytest.raises(RequestFailed) as rid:
        pair.decode.run(pair.submission(_prompt(10), rid=leg.rid))
    assert Reason.RID_IN_USE is rid.value.reason
    pair.decode.parts.engine.cancel(leg.key, Reason.ABORTED)
    assert Reason.ABORTED is run.end()[0]


def test_an_unknown_prefill_ends_the_decode_leg_with_its_cause(pair: Pair) -> None:
    leg = pair.submission(_prompt(10), bootstrap=RankAddress("127.0.0.1", 1))
    assert Reason.PEER_UNREACHABLE is pair.decode.run(leg).end()[0]
