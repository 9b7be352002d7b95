"""What happens to a request before any handshake: it is checked and tokenised, or refused.

All that can be said against a request is said here: its shape, its model, its length in tokens, the
room left in the queue. Short prompts take no turn through a thread or a task.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from pdcluster_protocol.config import RouterConfig
from pdcluster_protocol.errors import Overloaded, PDClusterError, Reason
from pdcluster_protocol.requests import (
    Api,
    ParsedRequest,
    RequestLimits,
    parse_request,
)
from pdcluster_sidecar.router.exchange import Exchange
from pdcluster_sidecar.router.replies import Failure
from pdcluster_sidecar.router.request import ClientRequest
from pdcluster_sidecar.router.sequence import Surroundings
from pdcluster_sidecar.router.tokens import SHORT_CHARACTERS_MAX, Codec, needs_codec, text_length

TOKENISER_THREADS: Final = 2
OWN_FAULT: Final = "a fault of this router's own; its log says which"


class Front:
    """Takes client requests from the byte path and starts what answers them."""

    def __init__(self, config: RouterConfig, shared: Surroundings) -> None:
        self._config = config
        self._shared = shared
        self._limits = RequestLimits(served_name=config.served_name, max_context=config.max_context)
        self._threads = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokenise")
        self._preparing: set[asyncio.Task[None]] = set()
        self.closing = False

    def compute(self, exchange: Exchange, api: Api) -> None:
        """Answer one POST of a computing path."""
        request = ClientRequest(
            exchange, api, config=self._config, limits=self._limits, shared=self._shared
        )
        exchange.identity = request.identity()
        if self.closing:
            request.refuse(
                Failure.because(Reason.SHUTTING_DOWN, "this router is shutting down; try again")
            )
            return
        try:
            parsed = parse_request(api, exchange.body, self._limits, legs=False)
            request.take(parsed)
            codec = self._shared.members.codec()
            if needs_codec(parsed) and (codec is None or _is_long(parsed)):
                self._prepare_later(request, parsed)
            else:
                request.start(self.tokenise(parsed, codec), codec)
        except PDClusterError as error:
            request.refuse(Failure.of(error))
        except Exception as fault:  # noqa: BLE001  Told to the client and to the log.
            self._own_fault(request, fault)

    def tokenise(self, parsed: ParsedRequest, codec: Codec | None) -> list[list[int]]:
        """The ids of all prompts.

        Raises:
            InvalidRequest: a prompt cannot be rendered, or is far too long.
        """
        if codec is not None:
            return codec.encode_request(parsed, self._limits)
        return [list(prompt) for prompt in parsed.prompts if not isinstance(prompt, str)]

    async def close(self) -> None:
        """Drop what is being prepared."""
        for task in tuple(self._preparing):
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepare_later(self, request: ClientRequest, parsed: ParsedRequest) -> None:
        if len(self._preparing) >= self._config.max_queued:
            raise Overloaded("too many prompts wait for the tokenizer; try again later")
        task = asyncio.get_running_loop().create_task(self._prepare(request, parsed))
        self._preparing.add(task)
        task.add_done_callback(partial(self._prepared, request))

    def _prepared(self, request: ClientRequest, task: asyncio.Task[None]) -> None:
        self._preparing.discard(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            self._own_fault(request, fault)

    def _own_fault(self, request: ClientRequest, fault: BaseException) -> None:
        """One request fails by it, in words; the log has the rest."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": f"request {request.rid} failed here", "exception": fault}
        )
        request.refuse(Failure.because(Reason.INVARIANT_VIOLATED, OWN_FAULT))

    async def _prepare(self, request: ClientRequest, parsed: ParsedRequest) -> None:
        """Tokenise in a thread, and before that wait for the first tokenizer."""
        members = self._shared.members
        queue_seconds = self._config.timeouts.queue_seconds
        try:
            async with asyncio.timeout(queue_seconds):
                await members.codec_known.wait()
        except TimeoutError:
            message = f"no engine has brought its tokenizer within {queue_seconds:g} s"
            request.refuse(Failure.because(Reason.NO_PAIR, message))
            return
        codec = members.codec()
        try:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._threads, self.tokenise, parsed, codec)
            if not request.ended:
                request.start(ids, codec)
        except PDClusterError as error:
            request.refuse(Failure.of(error))


def _is_long(parsed: ParsedRequest) -> bool:
    return text_length(parsed) > SHORT_CHARACTERS_MAX
