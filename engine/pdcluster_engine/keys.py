"""Reading the cluster's keys: a folder with one file per key id, as a mounted Secret has it."""

from __future__ import annotations

from pathlib import Path

from pdcluster_protocol.authentication import KeyRing
from pdcluster_protocol.errors import ConfigError


def load_keys(folder: str) -> KeyRing:
    """The key ring of a folder; names that begin with a dot (Kubernetes' own links) are no keys.

    Raises:
        ConfigError: folder or file cannot be read, or a key is unusable. Never shows a key.
    """
    try:
        files = [path for path in Path(folder).iterdir() if not path.name.startswith(".")]
        keys = {path.name: path.read_bytes() for path in files if path.is_file()}
    except OSError as error:
        raise ConfigError(
            f"keys_folder is {folder!r}: {error.strerror}; give a readable folder with one file"
            " per key id"
        ) from error
    return KeyRing(keys)
