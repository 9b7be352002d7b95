"""Packed rows: their bytes, what is lost, and that a run over them equals any other such run."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from pdcluster_engine.model.builtin import tiny_glm_wide
from pdcluster_engine.model.loading import LoadedModel, load_runner
from pdcluster_engine.model.packing import (
    pack_indexer,
    pack_latent,
    packed_bytes,
    unpack_indexer,
    unpack_latent,
)
from pdcluster_engine.model.port import DecodeRow
from pdcluster_engine.model.shim import forward_one
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.sizing import BUILTIN_CONFIGS, FP8_DS_MLA, size
from pdcluster_protocol.topology import Parallelism
from support.model_folders import EXPERTS, LATENTS, SMALL, save_model
from support.model_runs import PagedModel, generate, move_rows
from support.prompts import prompt

WIDE = "builtin://tiny-glm-wide"
LENGTHS = (1, 64, 65, 130)
TOKENS = 8

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def load_packed(source: str = WIDE, *, mode: str = "exact") -> LoadedModel:
    return load_runner(source, dtype=FP8_DS_MLA, mode=mode, threads=1)


def packed_model(
    *, mode: str = "exact", seed: int = 0, parallel: Parallelism | None = None
) -> PagedModel:
    return PagedModel(loaded=load_packed(mode=mode), seed=seed, parallel=parallel)


def e4m3(code: int) -> float:
    """By the definition: a sign, four bits of exponent (bias 7), three bits of fraction."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = code >> 3 & 0xF, code & 0x7
    if (exponent, fraction) == (0xF, 0x7):
        return math.nan
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def bfloat16(pair: bytes) -> float:
    """The upper half of a float32."""
    return float(struct.unpack("<f", b"\x00\x00" + pair)[0])


def rows_of(seed: int, *, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Five latents whose blocks differ much in size, and their rope keys."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(5, 512, generator=generator)
    latent *= (torch.tensor([1e-3, 1.0, 7.0, 300.0]) * spread).repeat_interleave(128)
    return latent, torch.randn(5, 64, generator=generator) * spread


# --- bytes ----------------------------------------------------------------------------------------


def test_rows_have_the_bytes_of_the_production_layout() -> None:
    latent, rope = rows_of(0)
    assert (5, 656) == pack_latent(latent, rope).shape
    assert (5, 132) == pack_indexer(latent[:, :128]).shape
    assert (656, 132) == (packed_bytes("packed"), packed_bytes("indexer"))


def test_each_part_of_a_row_lies_at_its_offset() -> None:
    """Read by hand from the bytes, with no number format of the library's."""
    latent, rope = rows_of(1)
    for row, values, keys in zip(pack_latent(latent, rope), latent, rope, strict=True):
        packed = row.numpy().tobytes()
        scales = struct.unpack("<4f", packed[512:528])
        for block, scale in enumerate(scales):
            part = values[128 * block : 128 * (block + 1)]
            assert float(part.abs().max()) / 448 == pytest.approx(scale, rel=1e-6)
        read = [e4m3(code) * scales[index // 128] for index, code in enumerate(packed[:512])]
        assert values.tolist() == pytest.approx(read, rel=1 / 16 + 1e-6, abs=max(scales) / 1024)
        rotated = [bfloat16(packed[at : at + 2]) for at in range(528, 656, 2)]
        assert keys.to(torch.bfloat16).float().tolist() == rotated


def test_an_indexer_row_is_its_elements_and_one_scale() -> None:
    keys = rows_of(2)[0][:, 128:256]
    for row, values in zip(pack_indexer(keys), keys, strict=True):
        packed = row.numpy().tobytes()
        (scale,) = struct.unpack("<f", packed[128:])
        read = [e4m3(code) * scale for code in packed[:128]]
        assert values.tolist() == pytest.approx(read, rel=1 / 16 + 1e-6, abs=scale / 1024)


@EACH_DTYPE
@given(seed=st.integers(0, 1 << 32), exponent=st.integers(-30, 30))
@settings(max_examples=40, deadline=None)
def test_what_comes_back_is_within_half_a_step_of_each_format(
    dtype: torch.dtype, seed: int, exponent: int
) -> None:
    latent, rope = (part.to(dtype) for part in rows_of(seed, spread=2.0**exponent))
    back, turned = unpack_latent(pack_latent(latent, rope), torch.float32)
    largest = latent.float().unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True).expand(5, 4, 128)
    step = torch.maximum(latent.float().abs() / 16, largest.flatten(-2) / 448 / 1024)
    assert bool(((back - latent.float()).abs() <= step * (1 + 1e-5)).all())
    assert bool(((turned - rope.float()).abs() <= rope.float().abs() / 256).all())
    keys = latent[:, :128]
    assert torch.equal(back[:, :128], unpack_indexer(pack_indexer(keys), torch.float32))


@EACH_DTYPE
def test_the_bytes_of_a_row_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    latent, rope = (part.to(dtype) for part in rows_of(3))
    together = pack_latent(latent, rope)
    alone = [pack_latent(latent[i : i + 1], rope[i : i + 1]) for i in range(5)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, pack_latent(latent[None, None], rope[None, None])[0, 0])


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    nothing = unpack_latent(pack_latent(torch.zeros(1, 512), torch.zeros(1, 64)), torch.float32)
    assert not any(bool(part.any()) for part in nothing)
    for poison in (math.nan, math.inf, -math.inf):
        latent, rope = rows_of(4)
        latent[0, 130] = poison
        back, _ = unpack_latent(pack_latent(latent, rope), torch.float32)
        assert not math.isfinite(float(back[0, 130])), poison
        assert bool(torch.isfinite(back[0, :128]).all())
        assert bool(torch.isfinite(back[1:]).all())


# --- models ---------------------------------------------------------------------------------------


def test_the_engine_finds_the_regions_that_sizing_computes() -> None:
    config = dict(BUILTIN_CONFIGS["tiny-glm-wide"])
    sizing = size(config, dtype=FP8_DS_MLA, page_size=64, max_context=4096)
    loaded = load_packed()
    assert sizing.layout == loaded.layout
    assert 3 * 656 + 2 * 132 == loaded.layout.bytes_per_token
    assert (FP8_DS_MLA, "float32") == (loaded.summary["kv_dtype"], loaded.summary["dtype"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-glm", "kv.dtype is fp8_ds_mla, whose latent rows have 512 elements; this model's"),
        ("tiny-deepseek", "whose latent rows have 512 elements; this model's have 32: use auto"),
        ("tiny-llama", "stores a key per head and no compressed latent: use auto"),
    ],
)
def test_a_model_with_other_rows_is_refused_by_their_kind(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_packed(f"builtin://{name}")
    assert words in caught.value.detail


class RoundingLayer(DynamicIndexedLayer):  # type: ignore[misc]  # Lint's environment has no library.
    """The library's own cache of a layer, of which every row was packed and unpacked."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: object, **named: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = unpack_latent(pack_latent(key_states, value_states), key_states.dtype)
        keys, values = super().update(*rounded, *rest, **named)
        return keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        rounded = unpack_indexer(pack_indexer(indexer_key_states), indexer_key_states.dtype)
        return super().update_indexer(rounded)


def rounded_run(ids: list[int], *, chunk: int) -> list[torch.Tensor]:
    """Logits of `TOKENS` tokens with no page anywhere."""
    model = tiny_glm_wide().eval()
    cache = DynamicCache(config=model.config)
    cache.layers = [RoundingLayer() for _ in cache.layers]
    with torch.inference_mode():
        chunks = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
        logits = [forward_one(model, cache, torch.tensor([part])) for part in chunks][-1:]
        while len(logits) < TOKENS:
            token = int(logits[-1].argmax())
            logits.append(forward_one(model, cache, torch.tensor([[token]])))
    return logits


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_those_of_the_librarys_cache_with_rounded_rows(length: int) -> None:
    ids = prompt(length)
    model = packed_model(seed=length)
    pages = model.take(length + TOKENS)
    seen = model.decode(pages, length, model.prefill(pages, ids, chunk=50), tokens=TOKENS)
    expected = rounded_run(ids, chunk=50)
    assert torch.equal(torch.stack(expected), torch.stack(seen))
    plain = generate("tiny-glm-wide", ids, chunk=50, tokens=TOKENS)
    assert not torch.equal(torch.stack(plain), torch.stack(seen)), "nothing was rounded"


@pytest.mark.parametrize("mode", ["exact", "batched"])
def test_a_pair_has_the_logits_of_one_packing_run(mode: str) -> None:
    """Prefill here, decode there: three sequences in one batch, in each mode."""
    alone, source, target = (packed_model(mode=mode, seed=seed) for seed in range(3))
    rows: dict[PagedModel, list[DecodeRow]] = {alone: [], target: []}
    for length in (1, 64, 130):
        ids = prompt(length)
        here, there = source.take(length), target.take(length + 1)
        first = source.prefill(here, ids, chunk=50)
        move_rows(source, here, target, there, tokens=length)
        rows[target].append(DecodeRow(there, length, int(first.argmax())))
        pages = alone.take(length + 1)
        assert torch.equal(first, alone.prefill(pages, ids, chunk=50))
        rows[alone].append(DecodeRow(pages, length, int(first.argmax())))
    assert torch.equal(alone.runner.decode(rows[alone]), target.runner.decode(rows[target]))


@pytest.mark.parametrize("chunk", [7, 64, 300])
def test_other_chunks_choose_the_same_tokens(chunk: int) -> None:
    ids = prompt(150)
    tokens = []
    for size_of_chunk in (100, chunk):
        model = packed_model()
        pages = model.take(150 + TOKENS)
        first = model.prefill(pages, ids, chunk=size_of_chunk)
        tokens.append([int(x.argmax()) for x in model.decode(pages, 150, first, tokens=TOKENS)])
    assert tokens[0] == tokens[1]


def test_a_row_once_packed_never_changes() -> None:
    model = packed_model()
    ids, pages = prompt(200), model.take(210)

    def first_rows() -> list[bytes]:
        regions = range(len(model.layout.regions))
        return [bytes(model.page_bytes(region, pages[0])) for region in regions]

    model.prefill(pages, ids[:64], chunk=64)
    before = first_rows()
    for start in range(64, 200, 50):
        model.runner.prefill(pages, ids, start, min(start + 50, 200), lambda *_: None)
    first = torch.zeros(model.runner.vocab_size)
    model.decode(pages, 200, first, tokens=5)
    assert before == first_rows()


@pytest.mark.parametrize(
    "parallel", [Parallelism(tp=2), Parallelism(pp=2), Parallelism(tp=2, cp=2)]
)
def test_packed_rows_over_several_ranks_give_the_logits_of_one(parallel: Parallelism) -> None:
    seen = []
    for places in (Parallelism(), parallel):
        model = packed_model(parallel=places)
        pages = model.take(80)
        first = model.prefill(pages, prompt(70), chunk=50)
        seen.append(torch.stack(model.decode(pages, 70, first, tokens=4)))
    assert torch.equal(*seen)


def test_a_folder_of_deepseek_in_bfloat16_keeps_its_weights_and_packs_its_rows(
    tmp_path: Path,
) -> None:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    config = DeepseekV3Config(**{**SMALL, **EXPERTS, **LATENTS, **widths})
    folder = save_model(config, tmp_path / "model", dtype=torch.bfloat16)
    loaded = load_packed(folder.as_uri())
    assert [656, 656] == [region.bytes_per_token for region in loaded.layout.regions]
    assert ("bfloat16", FP8_DS_MLA) == (loaded.summary["dtype"], loaded.summary["kv_dtype"])
    model = PagedModel(loaded=loaded)
    pages = model.take(80)
    whole = model.prefill(pages, prompt(70), chunk=70)
    assert bool(torch.isfinite(whole).all())
