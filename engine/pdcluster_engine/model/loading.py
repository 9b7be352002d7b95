"""A source becomes a model that can be served, or a refusal that says what to do.

Sources: `builtin://NAME` (`builtin.BUILTIN`) and `file:///folder` (a Hugging Face folder with
`config.json`, `*.safetensors` and `tokenizer.json`). Nothing is looked up on a network, no code of
a folder is run, no pickle is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import tokenizers
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as library_logging

from pdcluster_engine.memory.device import require_device
from pdcluster_engine.model.builtin import BUILTIN, byte_codec
from pdcluster_engine.model.probe import packed, probe
from pdcluster_engine.model.runner import DecodeMode, TransformersRunner
from pdcluster_engine.model.shim import require_pinned_version
from pdcluster_engine.text import TextCodec, TextConfig
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import KVLayout
from pdcluster_protocol.sizing import FP8_DS_MLA, NATIVE_CACHE_DTYPES

_LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
_STATEFUL_ROPES = ("dynamic",)
"""They remember the longest sequence so far, so one request would change the next one's logits."""


class LoadedModel(msgspec.Struct, frozen=True):
    """All that the engine needs of a model."""

    runner: TransformersRunner
    tokenizer: TextCodec
    layout: KVLayout
    summary: dict[str, str]
    """What shapes logits, for the fingerprint and `/model_info`."""


def load_runner(
    source: str,
    *,
    dtype: str,
    mode: str,
    threads: int,
    page_size: int = 64,
    device: str = "cpu",
) -> LoadedModel:
    """Load, probe and wrap a model; the first computation of the process happens here.

    `dtype` is the cache's: "auto" is the checkpoint's own, float32 for builtin models; a plain type
    is also that of the weights, since the model makes the rows; with `fp8_ds_mla` the weights keep
    the checkpoint's type and rows are packed when they are stored. Weights are read, or drawn, in
    host memory and then moved to `device`, so they are the same on every device.

    Raises:
        ConfigError: naming the field, its value and the remedy.
    """
    require_pinned_version()
    _require_one_of("dtype", dtype, NATIVE_CACHE_DTYPES)
    _require_one_of("mode", mode, tuple(DecodeMode))
    if threads < 1:
        raise ConfigError(f"threads is {threads}; it must be at least 1")
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; it must be at least 1")
    place = require_device(device)
    torch.set_num_threads(threads)
    # Standard error is one JSON object a line; what matters of a load is raised or summarized.
    library_logging.disable_progress_bar()
    library_logging.set_verbosity_error()
    packs = dtype == FP8_DS_MLA
    model, codec = _load(source, dtype="auto" if packs else dtype)
    _move(model, place)
    model.eval()
    config = model.config.get_text_config(decoder=True)
    _require_stateless_rope(config)
    probed = probe(model, page_size=page_size)
    if packs:
        probed = packed(probed)
    runner = TransformersRunner(
        model,
        probed,
        mode=DecodeMode(mode),
        eos_ids=_eos_ids(model, codec),
        max_context=int(config.max_position_embeddings),
    )
    return LoadedModel(
        runner=runner,
        tokenizer=codec,
        layout=probed.layout,
        summary=_summary(model, source=source, runner=runner),
    )


def _move(model: PreTrainedModel, device: torch.device) -> None:
    try:
        model.to(device)
    except RuntimeError as error:
        # Torch's out-of-memory error is one of these, and so is what the driver says.
        raise ConfigError(
            f"the model does not fit on {device}: {error}; use a smaller dtype or another device"
        ) from error


def _load(source: str, *, dtype: str) -> tuple[PreTrainedModel, TextCodec]:
    parts = urlsplit(source)
    match parts.scheme:
        case "builtin":
            return _load_builtin(parts.netloc + parts.path, dtype=dtype)
        case "file":
            if parts.netloc not in {"", "localhost"}:
                raise ConfigError(
                    f"model_source {source!r} names the host {parts.netloc!r}; an absolute folder "
                    "has three slashes: file:///folder"
                )
            return _load_folder(Path(unquote(parts.path)), dtype=dtype)
        case _:
            raise ConfigError(
                f"model_source is {source!r}; it must begin with builtin:// or file:///"
            )


def _load_builtin(name: str, *, dtype: str) -> tuple[PreTrainedModel, TextCodec]:
    if name not in BUILTIN:
        known = ", ".join(f"builtin://{known}" for known in sorted(BUILTIN))
        raise ConfigError(f"model_source builtin://{name} is unknown; there are {known}")
    model = BUILTIN[name]()
    if dtype not in {"auto", "float32"}:
        raise ConfigError(
            f"dtype is {dtype}; builtin models are float32, since only a folder's loader keeps the "
            "right weights in float32"
        )
    return model, byte_codec()


def _load_folder(folder: Path, *, dtype: str) -> tuple[PreTrainedModel, TextCodec]:
    _require_complete(folder)
    codec = _folder_codec(folder)
    try:
        # Asked for first: an unknown architecture must not cost the loading of its weights.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except _LOADING_ERRORS as error:
        raise ConfigError(f"model folder {folder} cannot be loaded: {error}") from error
    # The library fills what is missing with random numbers and only warns.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"model folder {folder} lacks {len(missing)} weights, the first is {missing[0]}; "
            "download all its files again"
        )
    return model, codec


def _require_complete(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist; check model_source")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; download the whole model")
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f" (only {others[0]}: convert it with save_pretrained)" if others else ""
        raise ConfigError(
            f"model folder {folder} has no weights: no *.safetensors{found}; download them beside "
            "config.json, or use builtin://tiny-glm"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model folder {folder} has no tokenizer.json; write one with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )


def _folder_codec(folder: Path) -> TextCodec:
    """The folder's tokenizer, its template from `chat_template.jinja` or the tokenizer's config."""
    raw: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: {error}") from error
    template_path = folder / "chat_template.jinja"
    template = template_path.read_text("utf-8") if template_path.is_file() else None
    config = TextConfig(
        chat_template=template if template is not None else _template_of(raw),
        **{
            name: _token_of(raw.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        },
    )
    return TextCodec.from_files(
        {
            "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
            "tokenizer_config.json": msgspec.json.encode(config),
        }
    )


def _template_of(raw: dict[str, Any]) -> str | None:
    """The template, or the one named `default` of several."""
    template = raw.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_of(value: object) -> str | None:
    """A special token as text or as a record with its text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(model: PreTrainedModel, codec: TextCodec) -> frozenset[int]:
    """Every id that ends a sequence, by any of the three places that say so."""
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for config in (model.config.get_text_config(decoder=True), generation):
        value = getattr(config, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, Iterable):
            ids.update(int(token) for token in value)
    if codec.config.eos_token is not None:
        token_id = codec.token_id(codec.config.eos_token)
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def _summary(model: PreTrainedModel, *, source: str, runner: TransformersRunner) -> dict[str, str]:
    config = model.config
    return {
        "source": source,
        "model_type": str(config.model_type),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": runner.layout.dtype,
        "attention": str(config._attn_implementation),  # noqa: SLF001  Has no public name.
        "experts": str(getattr(config, "_experts_implementation", None)),
        "mode": str(runner.mode),
        "device": str(model.device.type),
        "layout": runner.layout.digest(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "tokenizers": str(tokenizers.__version__),
    }


def _require_stateless_rope(config: PreTrainedConfig) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind in _STATEFUL_ROPES:
        raise ConfigError(
            f"rope_type is {kind!r}: its positions depend on earlier requests, so prefill and "
            "decode would disagree; set another rope_type in config.json"
        )


def _require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{field} is {value!r}; it must be one of {', '.join(known)}")
