"""`python -m pdcluster_engine --config FILE`: the engine of a container, or of a local run."""

from __future__ import annotations

import os
import sys

from pdcluster_engine import process


def main() -> None:
    """Run and leave without the interpreter's farewell, which would wait for a running forward."""
    code = process.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
