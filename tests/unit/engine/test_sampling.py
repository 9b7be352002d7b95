"""Choosing tokens: the library's order, and nothing but (seed, position) as chance."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdcluster_engine.sampling import Sampled, SamplingParameters, generator_seed, sample
from pdcluster_protocol.errors import InvalidRequest, Reason, RequestFailed


def logits(seed: int = 0, size: int = 264) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def draw(scores: torch.Tensor, parameters: SamplingParameters, position: int = 0) -> Sampled:
    return sample(scores, parameters, history=(), output=(), position=position)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    scores = logits()
    chosen = draw(scores, SamplingParameters(temperature=0, top_p=0.1, top_k=3))
    assert int(scores.argmax()) == chosen.token_id
    assert float(torch.log_softmax(scores, -1)[chosen.token_id]) == chosen.logprob
    assert () == chosen.top_logprobs


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-30])
@pytest.mark.parametrize("temperature", [1e-5, 1.0])
def test_the_smallest_penalty_that_is_allowed_repeats_what_was_there(
    penalty: float, temperature: float
) -> None:
    parameters = SamplingParameters(repetition_penalty=penalty, temperature=temperature)
    scores = torch.tensor([1.0, 2.0, 3.0, -1.0])

    assert 1 == sample(scores, parameters, history=[1, 3], output=(), position=2).token_id


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not() -> None:
    scores = torch.zeros(1000)
    parameters = SamplingParameters(seed=42)
    tokens = [draw(scores, parameters, position).token_id for position in range(20)]
    assert tokens == [draw(scores, parameters, position).token_id for position in range(20)]
    assert 15 < len(set(tokens))
    others = SamplingParameters(seed=43)
    assert tokens != [draw(scores, others, position).token_id for position in range(20)]


def test_a_draw_neither_uses_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = draw(logits(), SamplingParameters(seed=5), 3)
    assert bool(torch.equal(before, torch.get_rng_state()))
    torch.manual_seed(2)
    assert one == draw(logits(), SamplingParameters(seed=5), 3)


def test_generator_seeds_are_64_bits_of_both_numbers() -> None:
    seeds = {generator_seed(seed, position) for seed in (None, 1, -1, 2**63) for position in (0, 1)}
    assert 8 == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert generator_seed(None, 4) == generator_seed(0, 4)


@pytest.mark.parametrize("seed", range(12))
def test_all_together_choose_what_the_library_would_choose(seed: int) -> None:
    scores = logits(seed)
    history = [1, 2, 3, 3, 7, 200]
    parameters = SamplingParameters(
        temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=seed
    )
    expected = scores.unsqueeze(0)
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(40),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ):
        expected = processor(torch.tensor([history]), expected)
    generator = torch.Generator().manual_seed(generator_seed(seed, 9))
    token = int(torch.multinomial(torch.softmax(expected[0], -1), 1, generator=generator))
    chosen = sample(scores, parameters, history=history, output=history[3:], position=9)
    assert token == chosen.token_id


def test_presence_and_frequency_count_the_output_alone() -> None:
    scores = torch.tensor([3.0, 2.5, 1.4, 0.0])

    def choose(output: list[int], *, presence: float = 0, frequency: float = 0) -> int:
        parameters = SamplingParameters(
            temperature=0, presence_penalty=presence, frequency_penalty=frequency
        )
        return sample(
            scores, parameters, history=[0, 0, 0, *output], output=output, position=0
        ).token_id

    assert 0 == choose([], presence=2, frequency=2)
    assert 1 == choose([0], presence=1)
    assert 0 == choose([0, 0, 0], presence=0.4)
    assert 1 == choose([0, 0, 0], frequency=0.4)
    assert 2 == choose([0, 0, 0, 1, 1, 1], frequency=0.6)


def test_logprobs_are_of_the_model_not_of_the_penalized_distribution() -> None:
    scores = logits()
    parameters = SamplingParameters(temperature=2, top_k=1, repetition_penalty=5, logprobs=4)
    chosen = sample(scores, parameters, history=range(200), output=(), position=0)
    values, ids = torch.log_softmax(scores, -1).topk(4)
    assert tuple(zip(ids.tolist(), values.tolist(), strict=True)) == chosen.top_logprobs


def test_the_logits_stay_as_they_were_also_when_made_for_inference_only() -> None:
    with torch.inference_mode():
        scores = logits().clone()
        before = scores.clone()
    parameters = SamplingParameters(
        top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=2, frequency_penalty=1, seed=1
    )
    sample(scores, parameters, history=[1, 2], output=[2], position=0)
    assert bool(torch.equal(before, scores))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_gives_no_number_fails_the_request(bad: float) -> None:
    scores = logits()
    scores[3] = bad
    with pytest.raises(RequestFailed, match="position 7") as caught:
        draw(scores, SamplingParameters(temperature=0), 7)
    assert Reason.MODEL_FAILED == caught.value.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logprobs", 129),
        ("logprobs", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_and_value(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is {value}; it must be") as caught:
        SamplingParameters(**{field: value})  # type: ignore[arg-type]  # Names come from the table.
    assert field == caught.value.field
