"""All fuzz targets."""

from __future__ import annotations

from fuzz import connections, files, http, link, machines, memory, requests, wire
from fuzz.target import Target

TARGETS: tuple[Target, ...] = (
    *wire.TARGETS,
    *link.TARGETS,
    *http.TARGETS,
    *connections.TARGETS,
    *requests.TARGETS,
    *files.TARGETS,
    *memory.TARGETS,
    *machines.TARGETS,
)
