"""Signed calls to sidecars, beside the hot path: hello, load, tokenizer, abort."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from pdcluster_protocol.authentication import HEADER, HttpSigner, HttpVerifier
from pdcluster_protocol.control_api import (
    HELD_SECONDS,
    AbortRequest,
    LoadReport,
    decode_body,
)
from pdcluster_protocol.errors import PDClusterError, Reason, RemoteProtocolError, WireError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import InstanceCard
from pdcluster_sidecar.router.tokens import TokenizerAnswer

CALL_SECONDS: Final = 1.0
TOKENIZER_SECONDS: Final = 30.0
ANSWER_BYTES_MAX: Final = 4 << 20
TOKENIZER_BYTES_MAX: Final = 64 << 20
ABORTS_MAX: Final = 4096
CONNECTIONS_MAX: Final = 4
"""To one sidecar. A call takes a millisecond there; many aborts at once wait for each other instead
of leaving it with as many idle connections."""
ABORT_TRIES: Final = 2
ABORTS_CLOSE_SECONDS: Final = 0.5
"""How long aborts that are under way may hold up the end of the process."""


class CallFailed(RemoteProtocolError):
    """A sidecar did not answer, or not with 200."""

    reason = Reason.PEER_UNREACHABLE


class SidecarCalls:
    """One HTTP session to all sidecars."""

    def __init__(self, signer: HttpSigner, verifier: HttpVerifier) -> None:
        self._signer = signer
        self._verifier = verifier
        self._session = aiohttp.ClientSession(
            # Bounded for each sidecar only: a call is held at every one of them, and aborts must
            # not wait for that.
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=CONNECTIONS_MAX, keepalive_timeout=15
            ),
            auto_decompress=False,
        )
        self._aborts: set[asyncio.Task[None]] = set()
        self.aborts_failed = 0
        """Aborts that reached no sidecar; the closed leg then says it alone."""

    async def close(self) -> None:
        """Give aborts that are under way a moment, then close all connections."""
        aborts = tuple(self._aborts)
        if aborts:
            await asyncio.wait(aborts, timeout=ABORTS_CLOSE_SECONDS)
        for task in aborts:
            task.cancel()
        # Each gives its connection back first, else nobody would close it.
        await asyncio.gather(*aborts, return_exceptions=True)
        await self._session.close()

    async def hello(self, address: RankAddress, ours: InstanceCard) -> InstanceCard:
        """Exchange cards with a sidecar; its answer must be signed.

        Raises:
            CallFailed, WireError, Unauthorized: by what is wrong.
        """
        body = msgspec.json.encode(ours)
        request, raw, signature = await self._call("POST", address, "/pd/v1/hello", body)
        session = self._verifier.verify_answer(signature, request, raw)
        card = decode_body(raw, InstanceCard)
        if card.session != session:
            raise WireError(f"{address} signs as another session than its card names")
        return card

    async def load(self, address: RankAddress) -> LoadReport:
        """What the ranks of this sidecar can take.

        Raises:
            CallFailed, WireError: by what is wrong.
        """
        _, raw, _ = await self._call("GET", address, "/pd/v1/load", b"")
        return decode_body(raw, LoadReport)

    async def held_load(self, address: RankAddress, incarnation: str) -> LoadReport:
        """The same, as soon as this incarnation is not ready any more, else after a while.

        Raises:
            CallFailed, WireError: by what is wrong.
        """
        target = f"/pd/v1/load?while_ready={quote(incarnation, safe='')}"
        _, raw, _ = await self._call(
            "GET", address, target, b"", seconds=CALL_SECONDS + HELD_SECONDS
        )
        return decode_body(raw, LoadReport)

    async def tokenizer(self, address: RankAddress) -> TokenizerAnswer:
        """The tokenizer's files.

        Raises:
            CallFailed, WireError: by what is wrong.
        """
        _, raw, _ = await self._call(
            "GET",
            address,
            "/pd/v1/tokenizer",
            b"",
            seconds=TOKENIZER_SECONDS,
            bytes_max=TOKENIZER_BYTES_MAX,
        )
        return decode_body(raw, TokenizerAnswer)

    def abort(self, address: RankAddress, request: AbortRequest) -> None:
        """Send an abort without waiting for it; the engine also sees that its leg is closed."""
        if len(self._aborts) >= ABORTS_MAX:
            self.aborts_failed += 1
            return
        task = asyncio.get_running_loop().create_task(self._abort(address, request))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, address: RankAddress, request: AbortRequest) -> None:
        body = msgspec.json.encode(request)
        for _ in range(ABORT_TRIES):
            try:
                await self._call("POST", address, "/pd/v1/abort", body)
                return
            except PDClusterError:
                continue
        self.aborts_failed += 1

    async def _call(
        self,
        method: str,
        address: RankAddress,
        target: str,
        body: bytes,
        *,
        seconds: float = CALL_SECONDS,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> tuple[str, bytes, str | None]:
        """Our signature, the body of the answer, its signature; anything but 200 is an error."""
        signature = self._signer.sign(method, target, body, authority=str(address))
        url = URL(f"http://{address}{target}", encoded=True)
        headers = {"content-type": "application/json", HEADER: signature}
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(
                    method, url, data=body or None, headers=headers, allow_redirects=False
                ) as answer,
            ):
                raw = await _read(answer.content, bytes_max)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            what = str(error) or f"no answer within {seconds:g} s"
            raise CallFailed(f"{address}{target}: {what}") from error
        if answer.status != 200:
            said = raw[:200].decode("utf-8", "replace")
            raise CallFailed(f"{address}{target} answers {answer.status}: {said}")
        return signature, raw, answer.headers.get(HEADER)


async def _read(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in content.iter_any():
        size += len(piece)
        if size > bytes_max:
            raise ValueError(f"the answer is longer than {bytes_max} bytes")
        pieces.append(piece)
    return b"".join(pieces)
