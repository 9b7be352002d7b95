"""SGLang's own bootstrap registry as a process: `sglang_registry.py HOST PORT`; ends with stdin.

It runs in the environment of `tools/bench-peers`, from this folder.
"""

from __future__ import annotations

import sys

import sglang_imports  # noqa: F401  It must come before sglang.
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer

if __name__ == "__main__":
    server = MooncakeKVBootstrapServer(sys.argv[1], int(sys.argv[2]))
    sys.stdin.read()
