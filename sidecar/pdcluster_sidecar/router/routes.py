"""Which path is what, on the client port: three that compute, and a few that are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from pdcluster_protocol.config import RouterConfig
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.requests import Api
from pdcluster_sidecar.router.exchange import Exchange
from pdcluster_sidecar.router.replies import Failure

COMPUTING: Final = {str(api): api for api in Api}
MODELS: Final = "/v1/models"
READING: Final = ("GET", "HEAD")
OPENAI_COMPUTING: Final = ("POST",)
SGLANG_COMPUTING: Final = ("POST", "PUT")


class Routes:
    """The handler that the byte path calls for every request."""

    def __init__(
        self,
        config: RouterConfig,
        compute: Callable[[Exchange, Api], None],
        shortage: Callable[[], str],
        *,
        created_seconds: int,
    ) -> None:
        self._compute = compute
        self._shortage = shortage
        """Why no pair can be had; "" when one can."""
        self._name = config.served_name
        model = {
            "id": config.served_name,
            "object": "model",
            "created": created_seconds,
            "owned_by": "pdcluster",
            "max_model_len": config.max_context,
        }
        self._model = msgspec.json.encode(model)
        self._models = msgspec.json.encode({"object": "list", "data": [model]})

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or later."""
        api = COMPUTING.get(exchange.path)
        if api is not None:
            allowed = SGLANG_COMPUTING if api is Api.GENERATE else OPENAI_COMPUTING
            if exchange.method in allowed:
                self._compute(exchange, api)
            else:
                _refuse_method(exchange, allowed)
            return
        known = exchange.path in {MODELS, "/health", "/ready"}
        if not known and not exchange.path.startswith(f"{MODELS}/"):
            message = f"{exchange.path[:200]} is no path of this router"
            exchange.fail(_not_found(message))
        elif exchange.method not in READING:
            _refuse_method(exchange, READING)
        else:
            self._read(exchange)

    def _read(self, exchange: Exchange) -> None:
        match exchange.path:
            case "/v1/models":
                exchange.answer(200, self._models)
            case "/health":
                exchange.answer(200, b"OK", content_type=b"text/plain")
            case "/ready":
                if why := self._shortage():
                    message = f"no prefill and decode of one fingerprint are ready; {why}"
                    exchange.fail(Failure.because(Reason.NO_PAIR, message))
                else:
                    exchange.answer(200, b"OK", content_type=b"text/plain")
            case _:
                name = exchange.path.removeprefix(f"{MODELS}/")
                if name == self._name:
                    exchange.answer(200, self._model)
                else:
                    message = f"model is {name[:200]}; it must be {self._name}"
                    exchange.fail(_not_found(message, param="model"))


def _not_found(message: str, *, param: str | None = None) -> Failure:
    reason = Reason.MODEL_NOT_FOUND if param else Reason.UNSUPPORTED
    return Failure(status=404, reason=reason, message=message, param=param)


def _refuse_method(exchange: Exchange, allowed: tuple[str, ...]) -> None:
    listed = ", ".join(allowed)
    message = f"{exchange.path} takes {listed}, not {exchange.method}"
    failure = Failure(status=405, reason=Reason.INVALID_REQUEST, message=message)
    headers = (*failure.headers(), (b"allow", listed.encode()))
    exchange.answer(405, failure.body(), headers=headers)
