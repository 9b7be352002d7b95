"""The `config.json` of a model source, as far as this machine has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdcluster_operator.place import resolve_source
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.sizing import BUILTIN_CONFIGS
from pdcluster_protocol.undecodable import UNDECODABLE

CONFIG_BYTES_MAX = 16 << 20


def read_model_config(source: str, source_folder: Path) -> Mapping[str, object]:
    """The config that sizing needs; weights are never looked at.

    Raises:
        ConfigError: an unknown builtin model, a folder or file that is missing or no JSON object,
            or a source whose files are not on this machine.
    """
    scheme, _, rest = resolve_source(source, str(source_folder)).partition("://")
    match scheme:
        case "builtin":
            if rest not in BUILTIN_CONFIGS:
                known = ", ".join(f"builtin://{name}" for name in sorted(BUILTIN_CONFIGS))
                raise ConfigError(f"spec.model.source is {source!r}; there are {known}")
            return BUILTIN_CONFIGS[rest]
        case "file":
            return _read(Path(rest))
        case _:
            raise ConfigError(
                f"spec.model.source is {source!r}; its config.json is not on this machine: download"
                " it into a folder and write file://FOLDER"
            )


def require_weights(source: str, source_folder: Path) -> None:
    """See that a folder can be served, before any process starts.

    Raises:
        ConfigError: naming the folder and what is missing in it.
    """
    resolved = resolve_source(source, str(source_folder))
    if not resolved.startswith("file://"):
        read_model_config(source, source_folder)
        return
    folder = Path(resolved.removeprefix("file://"))
    _read(folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model folder {folder} has no weights (*.safetensors); download them there, or set"
            " spec.model.source to another model such as builtin://tiny-glm"
        )


def _read(folder: Path) -> Mapping[str, object]:
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist; correct spec.model.source")
    path = folder / "config.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"model folder {folder} has no readable config.json: {error.strerror}"
        ) from error
    try:
        return msgspec.json.decode(raw[:CONFIG_BYTES_MAX], type=dict[str, object])
    except UNDECODABLE as error:
        raise ConfigError(f"{path}: is no JSON object: {error}") from error
