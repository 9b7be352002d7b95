"""The HTTP library's complaints as our JSON lines, for the sidecar's server and the router's admin.

A malformed request, in its head or in its body, is a client's fault and normal input: it is
answered with 400 and not logged, or anybody could fill the log. A handler that failed is ours, with
its traceback.
"""

from __future__ import annotations

import logging

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

log = structlog.get_logger()


class ServerLog(logging.Handler):
    """Passes on what is our fault."""

    def emit(self, record: logging.LogRecord) -> None:
        fault = record.exc_info[1] if record.exc_info else None
        if not isinstance(fault, (HttpProcessingError, web.RequestPayloadError)):
            log.error("http_failed", detail=record.getMessage(), exc_info=record.exc_info)


def server_logger() -> logging.Logger:
    """The logger that the HTTP library gets."""
    logger = logging.getLogger(__name__)
    if not logger.handlers:
        logger.addHandler(ServerLog(logging.WARNING))
        logger.propagate = False
    return logger
