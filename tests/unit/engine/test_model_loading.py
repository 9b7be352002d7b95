"""What can be loaded, what is refused and by which words, and what importing must not do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from pdcluster_engine.model import shim
from pdcluster_engine.model.builtin import VOCAB_SIZE
from pdcluster_engine.model.loading import LoadedModel, load_runner
from pdcluster_engine.model.port import DecodeRow, ModelRunner
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.topology import Parallelism
from support.model_folders import EXPERTS, LATENTS, SMALL, save_model
from support.model_runs import MODELS, PAGE_COUNT, PagedModel, generate, place
from support.prompts import prompt


def load(source: str, **changes: object) -> LoadedModel:
    options: dict[str, object] = {"dtype": "auto", "mode": "exact", "threads": 1, **changes}
    return load_runner(source, **options)  # type: ignore[arg-type]  # Wrong values are the point.


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_model(LlamaConfig(**SMALL), tmp_path / "llama")


def test_builtin_models_say_what_the_engine_must_know() -> None:
    deepseek, glm, llama, qwen = (load(f"builtin://{name}") for name in MODELS)
    assert "float32" == glm.layout.dtype
    assert [
        *(
            "0.latent",
            "0.rope",
            "0.indexer",
            "1.latent",
            "1.rope",
            "1.indexer",
            "2.latent",
            "2.rope",
        )
    ] == [region.name for region in glm.layout.regions]
    assert ["0.key", "0.value", "1.key", "1.value"] == [r.name for r in llama.layout.regions]
    assert {2} == {region.heads for region in llama.layout.regions}
    assert {4} == {region.heads for region in qwen.layout.regions}
    assert {"latent", "rope"} == {region.kind for region in deepseek.layout.regions}
    for loaded in (deepseek, glm, llama, qwen):
        runner: ModelRunner = loaded.runner
        assert runner.layout == loaded.layout
        assert loaded.tokenizer.vocab_size == loaded.runner.vocab_size
        assert frozenset({256}) == loaded.runner.eos_ids
        assert 32768 == loaded.runner.max_context
    assert "glm_moe_dsa" == glm.summary["model_type"]
    assert "sdpa" == glm.summary["attention"]


def test_the_page_size_is_the_callers() -> None:
    assert 16 == load("builtin://tiny-llama", page_size=16).layout.page_size


FAMILIES = pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Qwen2Config(**{key: value for key, value in SMALL.items() if key != "head_dim"}),
        Qwen3Config(**SMALL),
        Glm4Config(**SMALL),
        Glm4MoeConfig(**{**SMALL, **EXPERTS}),
        DeepseekV3Config(**{**SMALL, **EXPERTS, **LATENTS}),
    ],
    ids=lambda config: config.model_type,
)


@FAMILIES
def test_a_folder_of_each_family_gives_the_logits_of_its_own_generate(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    folder = save_model(config, tmp_path / "model")
    loaded = load(folder.as_uri())
    assert frozenset({3, 256}) == loaded.runner.eos_ids
    assert 4096 == loaded.runner.max_context
    model = PagedModel(loaded=loaded)
    oracle = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = prompt(130)
    pages = model.take(140)
    seen = model.decode(pages, 130, model.prefill(pages, ids, chunk=50), tokens=6)
    expected = generate(oracle, ids, chunk=50, tokens=6)
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))


@FAMILIES
def test_a_ragged_batch_of_each_family_chooses_the_tokens_of_its_own_generate(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    folder = save_model(config, tmp_path / "model")
    model = PagedModel(loaded=load(folder.as_uri(), mode="batched"))
    oracle = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [prompt(length) for length in (1, 64, 130)]
    pages = [model.take(len(ids) + 6) for ids in prompts]
    chosen = [
        [int(model.prefill(own, ids, chunk=64).argmax())]
        for own, ids in zip(pages, prompts, strict=True)
    ]
    for step in range(5):
        rows = [
            DecodeRow(own, len(ids) + step, tokens[-1])
            for own, ids, tokens in zip(pages, prompts, chosen, strict=True)
        ]
        for tokens, logits in zip(chosen, model.runner.decode(rows), strict=True):
            tokens.append(int(logits.argmax()))
    for ids, tokens in zip(prompts, chosen, strict=True):
        expected = generate(oracle, ids, chunk=None, tokens=6)
        assert [int(step.argmax()) for step in expected] == tokens


def test_auto_is_the_checkpoints_type_and_another_one_can_be_asked_for(tmp_path: Path) -> None:
    folder = save_model(LlamaConfig(**SMALL), tmp_path / "half", dtype=torch.bfloat16)
    half, whole = load(folder.as_uri()), load(folder.as_uri(), dtype="float32")
    assert ("bfloat16", "float32") == (half.layout.dtype, whole.layout.dtype)
    assert 2 * half.layout.bytes_per_token == whole.layout.bytes_per_token
    assert torch.float32 == PagedModel(loaded=half).prefill([0], prompt(3), chunk=3).dtype


def test_a_template_file_and_special_tokens_of_a_folder_are_used(llama: Path) -> None:
    (llama / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|user|>"}, "chat_template": "old", "x": 1})
    )
    assert "old" == load(llama.as_uri()).tokenizer.render_chat([])
    (llama / "chat_template.jinja").write_text("{{ eos_token }}")
    loaded = load(llama.as_uri())
    assert "<|user|>" == loaded.tokenizer.render_chat([])
    assert loaded.tokenizer.token_id("<|user|>") in loaded.runner.eos_ids


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "builtin://gpt",
            "builtin://gpt is unknown; there are builtin://tiny-deepseek, builtin://tiny-",
        ),
        ("meta-llama/Llama-3", "must begin with builtin:// or file:///"),
        ("file://models/llama", "has three slashes"),
        ("file:///no/such/folder", "model folder /no/such/folder does not exist"),
    ],
)
def test_a_source_that_is_none_is_refused_by_name(source: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert words in caught.value.detail


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp8"}, "dtype is 'fp8'; it must be one of auto, float32"),
        ({"dtype": "bfloat16"}, "builtin models are float32"),
        ({"mode": "fast"}, "mode is 'fast'; it must be one of exact, batched"),
        ({"threads": 0}, "threads is 0"),
        ({"page_size": 0}, "page_size is 0"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("builtin://tiny-llama", **changes)
    assert words in caught.value.detail


def without(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        (folder / name).unlink()

    return remove


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_one_weight_less(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def as_noise(name: str) -> Callable[[Path], None]:
    def overwrite(folder: Path) -> None:
        (folder / name).write_bytes(b"no such thing")

    return overwrite


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without("config.json"), "has no config.json"),
        (without("model.safetensors"), "has no weights: no *.safetensors; download them"),
        (as_pickle, "only pytorch_model.bin: convert it"),
        (without("tokenizer.json"), "has no tokenizer.json"),
        (as_noise("tokenizer.json"), "tokenizer.json: "),
        (as_noise("tokenizer_config.json"), "tokenizer_config.json: "),
        (as_noise("model.safetensors"), "cannot be loaded"),
        (with_one_weight_less, "lacks 1 weights, the first is model.layers.1.mlp.up_proj"),
        (as_noise("config.json"), "cannot be loaded"),
        (with_config(model_type="gpt-17"), "cannot be loaded"),
        (
            with_config(rope_parameters={"rope_type": "dynamic", "factor": 2, "rope_theta": 1e4}),
            "rope_type is 'dynamic'",
        ),
    ],
)
def test_an_unusable_folder_is_refused_with_its_name_and_the_remedy(
    llama: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(llama)
    with pytest.raises(ConfigError) as caught:
        load(llama.as_uri())
    assert words in caught.value.detail


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (Gemma3TextConfig(**{**SMALL, "sliding_window": 32}), "DynamicSlidingWindowLayer"),
        (
            Qwen3NextConfig(
                **{
                    **SMALL,
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32,
                    "shared_expert_intermediate_size": 32,
                    "linear_num_value_heads": 4,
                    "linear_num_key_heads": 2,
                    "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16,
                }
            ),
            "LinearAttention",
        ),
    ],
    ids=["sliding", "recurrent"],
)
def test_a_model_without_one_row_per_token_is_refused_by_its_layer_class(
    config: PreTrainedConfig, layer: str, tmp_path: Path
) -> None:
    folder = save_model(config, tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"cache layer \d+ is a .*{layer}"):
        load(folder.as_uri())


def test_another_minor_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shim.require_pinned_version()
    monkeypatch.setattr(shim, "PINNED_MINOR", "5.23")
    with pytest.raises(ConfigError, match=r"transformers 5\.24\.\d+ is installed.*~=5\.23\.0"):
        load("builtin://tiny-llama")


def test_only_the_shim_names_the_argument_that_the_library_renames() -> None:
    folder = Path(shim.__file__).parent
    naming = {path.name for path in folder.rglob("*.py") if "cache=cache" in path.read_text()}
    assert {"shim.py"} == naming


def test_a_parent_that_imported_everything_has_one_thread_and_forks_working_children() -> None:
    """And the child's weights are the same as in any other process."""
    script = """
import hashlib, os
from pdcluster_engine.model.loading import load_runner
assert 1 == len(os.listdir("/proc/self/task")), os.listdir("/proc/self/task")
child = os.fork()
if child == 0:
    model = load_runner("builtin://tiny-glm", dtype="auto", mode="exact", threads=1).runner._model
    digest = hashlib.sha256()
    for name, weights in sorted(model.state_dict().items()):
        digest.update(name.encode() + weights.numpy().tobytes())
    print(digest.hexdigest(), flush=True)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(sys.path),
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)
    digest = hashlib.sha256()
    model = load("builtin://tiny-glm").runner._model
    for name, weights in sorted(model.state_dict().items()):
        digest.update(name.encode() + weights.numpy().tobytes())
    assert digest.hexdigest() == done.stdout.strip()


def test_loading_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load("builtin://tiny-llama")
    assert torch.equal(before, torch.get_rng_state())


def test_a_forward_before_an_arena_is_attached_is_a_named_fault() -> None:
    loaded = load("builtin://tiny-llama")
    with pytest.raises(RuntimeError, match="attach an arena"):
        loaded.runner.prefill([0], [1], 0, 1, lambda *_: None)
    loaded.runner.attach(place(loaded.layout, Parallelism()), PAGE_COUNT)
    assert (VOCAB_SIZE,) == loaded.runner.prefill([0], [1], 0, 1, lambda *_: None).shape
