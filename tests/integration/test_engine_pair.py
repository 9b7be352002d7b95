"""Two whole engines in one process, a relay between them: the same tokens as one alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.submission import FinishReason
from pdcluster_protocol.errors import Reason, RequestFailed
from pdcluster_protocol.ids import Key, RankAddress
from support.engine_pairs import Pair, prompt

SETTINGS = [
    ("local", "tiny-llama", "exact", "auto"),
    ("mooncake", "tiny-glm", "exact", "auto"),
    ("mooncake", "tiny-llama", "batched", "auto"),
    ("mooncake", "tiny-glm-wide", "exact", "fp8_ds_mla"),
    ("local", "tiny-deepseek", "exact", "auto"),
    ("local", "tiny-qwen", "exact", "auto"),
]


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    transport, model, mode, dtype = request.param
    with tempfile.TemporaryDirectory() as folder:
        running = Pair(
            folder, transport=transport, model=f"builtin://{model}", mode=mode, dtype=dtype
        )
        yield running
        running.close()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 300])
def test_a_pair_gives_the_same_tokens_and_logprobs_as_one_engine(pair: Pair, length: int) -> None:
    ids = prompt(length)
    alone = pair.decode.run(pair.submission(ids, bootstrap=None))
    assert (None, "") == alone.end()
    leg = pair.submission(ids)
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
    ids = prompt(70)
    free = pair.decode.run(pair.submission(ids, bootstrap=None, sampling=sampling))
    free.end()
    # Whatever the fourth token is, it ends the answer there, at its first occurrence.
    stop = frozenset({free.token_ids[3]})
    count = free.token_ids.index(free.token_ids[3]) + 1
    leg = pair.submission(ids, sampling=sampling, stop_token_ids=stop)
    first, second = pair.prefill.run(leg), pair.decode.run(leg)
    assert [(None, "")] * 2 == [first.end(), second.end()]
    assert free.token_ids[:count] == second.token_ids
    assert FinishReason.STOP is second.outputs[-1].finish


def test_decode_computes_no_prompt_token_and_all_bytes_are_counted(pair: Pair) -> None:
    before = pair.prefill.value("pdcluster_kv_bytes_total", kind="kv")
    computed = pair.decode.value("pdcluster_prompt_tokens_computed_total")
    leg = pair.submission(prompt(100))
    first, second = pair.prefill.run(leg), pair.decode.run(leg)
    assert [(None, "")] * 2 == [first.end(), second.end()]
    moved = pair.prefill.value("pdcluster_kv_bytes_total", kind="kv") - before
    assert 100 * pair.prefill.bytes_per_token == moved
    assert computed == pair.decode.value("pdcluster_prompt_tokens_computed_total")


def test_many_at_once_end_well_and_give_all_pages_back(pair: Pair) -> None:
    total = pair.decode.parts.engine.state().load.pages_total
    legs = [pair.submission(prompt(20 + 17 * index)) for index in range(8)]
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
    leg = pair.submission(prompt(64), output_tokens_max=900)
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
    leg = pair.submission(prompt(64))
    first = pair.prefill.run(leg)
    assert pair.prefill.parts.engine.cancel_rid(leg.rid, Reason.CLIENT_GONE)
    assert Reason.CLIENT_GONE is first.end()[0]
    pair.relay.wait_load(pair.prefill_port, pages_free=total)


def test_a_live_room_and_a_live_rid_are_refused_at_once(pair: Pair) -> None:
    leg = pair.submission(prompt(10), output_tokens_max=900, bootstrap=None)
    run = pair.decode.run(leg)
    with pytest.raises(RequestFailed) as room:
        pair.decode.run(pair.submission(prompt(10), key=leg.key))
    assert Reason.ROOM_IN_USE is room.value.reason
    with pytest.raises(RequestFailed) as rid:
        pair.decode.run(pair.submission(prompt(10), rid=leg.rid))
    assert Reason.RID_IN_USE is rid.value.reason
    pair.decode.parts.engine.cancel(leg.key, Reason.ABORTED)
    assert Reason.ABORTED is run.end()[0]


def test_an_unknown_prefill_ends_the_decode_leg_with_its_cause(pair: Pair) -> None:
    leg = pair.submission(prompt(10), bootstrap=RankAddress("127.0.0.1", 1))
    assert Reason.PEER_UNREACHABLE is pair.decode.run(leg).end()[0]
