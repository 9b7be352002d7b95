"""Bodies on their way in: each has a deadline, and all of them together a bound.

A signature covers the whole body, so a body must be taken in before anybody knows who sent it.
What bodies occupy is counted from their first byte until their request has been answered; what
would go over the bound is refused as overload, and what trickles is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from pdcluster_protocol.errors import Overloaded, WireError

BODIES_BYTES_MAX: Final = 64 << 20
BODY_SECONDS: Final = 10.0


class Bodies:
    """Reads the bodies of one server's requests."""

    def __init__(self, *, bytes_max: int = BODIES_BYTES_MAX, seconds: float = BODY_SECONDS) -> None:
        self._bytes_max = bytes_max
        self._seconds = seconds
        self.held_bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The whole body, counted for as long as the block runs; `request.read` gives it again.

        Raises:
            WireError: it did not arrive in time, or the client left before its end.
            Overloaded: all bodies together are too many.
            web.HTTPRequestEntityTooLarge: it is over the application's own bound.
        """
        pieces: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    async for piece in request.content.iter_any():
                        pieces.append(piece)
                        self._count(request, len(piece), sum(map(len, pieces)))
            except TimeoutError as error:
                raise WireError(
                    f"the body did not arrive within {self._seconds:g} s; send it faster"
                ) from error
            except ConnectionError as error:
                raise WireError("the client left before the end of its body") from error
            body = b"".join(pieces)
            # Where the library keeps a body that was read; it has no other way to count pieces.
            request._read_bytes = body  # noqa: SLF001
            yield body
        finally:
            self.held_bytes -= sum(map(len, pieces))

    def _count(self, request: web.Request, nbytes: int, own: int) -> None:
        self.held_bytes += nbytes
        if own > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=own)
        if self.held_bytes > self._bytes_max:
            raise Overloaded(
                f"request bodies of {self._bytes_max} bytes are under way; try again later"
            )
