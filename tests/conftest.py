"""For every test: one torch thread a process, and hypothesis prints how to repeat a failure."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before torch is imported anywhere: several engines share few cores, and idle worker threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared machines are slow at times; pytest-timeout bounds a test as a whole.
settings.register_profile(
    "pdcluster",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pdcluster")
