"""Two engines on the path of a GPU: one allocation each, Mooncake in the process, late marks.

Where no GPU is, the memory is a plain tensor and the marks are the test's, so that all of it but
CUDA itself runs. On a GPU the same program runs for real.
"""

from __future__ import annotations

import pytest

from support.device_programs import compare_on, require_equal

LENGTHS = (1, 63, 64, 65, 300)


@pytest.mark.parametrize(
    ("model", "mode"), [("tiny-glm", "exact"), ("tiny-llama", "batched")], ids=str
)
def test_a_pair_over_device_memory_gives_the_tokens_of_one_engine(model: str, mode: str) -> None:
    require_equal(
        compare_on("tensor", model=model, mode=mode, lengths=LENGTHS), count=len(LENGTHS) + 1
    )


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["tiny-glm", "tiny-llama"])
def test_a_pair_on_one_gpu_gives_the_tokens_of_one_engine(model: str) -> None:
    comparisons = compare_on(
        "cuda", model=model, mode="exact", lengths=(*LENGTHS, 900), timeout_seconds=280.0
    )
    require_equal(comparisons, count=len(LENGTHS) + 2)
