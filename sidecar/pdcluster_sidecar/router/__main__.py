"""`python -m pdcluster_sidecar.router --config FILE`."""

from __future__ import annotations

import sys

from pdcluster_sidecar.router.process import main

if __name__ == "__main__":
    sys.exit(main())
