"""Errors as clients see them: OpenAI's shape, the reason in a header, the status from the table."""

from __future__ import annotations

import msgspec
from aiohttp import web

from pdcluster_protocol.errors import HTTP_STATUS, InvalidRequest, PDClusterError, Reason

REASON_HEADER = "x-pd-reason"
RETRY_AFTER_SECONDS = 1
JSON = "application/json"


class ErrorBody(msgspec.Struct, frozen=True):
    """The inner object of `{"error": …}`."""

    message: str
    type: str
    code: str
    param: str | None = None


def error_json(reason: Reason, detail: str, *, status: int, field: str | None = None) -> bytes:
    """`{"error": {message, type, code, param}}`."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    return msgspec.json.encode({"error": ErrorBody(detail, kind, reason.value, field)})


def error_answer(error: PDClusterError) -> web.Response:
    """The whole answer for an error before the first byte."""
    field = error.field if isinstance(error, InvalidRequest) else None
    return refuse(error.reason, error.detail, field=field)


def refuse(
    reason: Reason, detail: str, *, status: int | None = None, field: str | None = None
) -> web.Response:
    """An answer with a reason; `status` where HTTP itself says another one than the table."""
    status = HTTP_STATUS.get(reason, 500) if status is None else status
    headers = {REASON_HEADER: reason.value}
    if status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return web.Response(
        status=status,
        body=error_json(reason, detail, status=status, field=field),
        headers=headers,
        content_type=JSON,
    )
