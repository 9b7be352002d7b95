"""The little that an engine process takes from, and does to, its environment.

It must run before torch and transformers are imported: both read some of these variables once.
"""

from __future__ import annotations

import os
from pathlib import Path

from pdcluster_engine.transport.linux import die_with_parent
from pdcluster_protocol.errors import ConfigError

PARENT_PID_VARIABLE = "PDCLUSTER_PARENT_PID"
"""Set by a supervisor that wants its children to die with it."""

_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    # Torch gets its threads by `set_num_threads`; these pools would only be started for nothing.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def prepare_environment() -> None:
    """Set the variables that libraries read at import; what the caller has set stays."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def follow_parent() -> None:
    """Die with the supervisor, when one asked for it.

    Raises:
        ConfigError: the variable is no number, or that parent is already gone.
    """
    value = os.environ.get(PARENT_PID_VARIABLE, "")
    if not value:
        return
    try:
        die_with_parent(int(value))
    except (ValueError, ProcessLookupError) as error:
        raise ConfigError(
            f"{PARENT_PID_VARIABLE} is {value!r}; it must be the pid of the living parent"
        ) from error


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or its container's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_MEMORY_MAX.read_text("ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
