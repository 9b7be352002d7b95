"""Bodies on their way in: each has a deadline, and all of them together a bound.

Anybody may open a connection and send, and nobody's signature can be checked before the last byte
of a body is here. So what bodies occupy is counted from their first byte until their request has
been answered, and what would go over the bound is refused as overload. A body that trickles is cut
off by its deadline.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from pdcluster_protocol.errors import InvalidRequest, Overloaded
from pdcluster_protocol.limits import Limits

BODIES_BYTES_MAX = 16 * Limits().body_bytes_max
"""What all bodies may occupy: 16 of the longest ones, or thousands of usual ones."""
BODY_SECONDS = 30.0


class Bodies:
    """Reads bodies for one server."""

    __slots__ = ("_bytes_max", "_held", "_seconds", "held_bytes")

    def __init__(self, *, bytes_max: int = BODIES_BYTES_MAX, seconds: float = BODY_SECONDS) -> None:
        self._bytes_max = bytes_max
        self._seconds = seconds
        self._held: dict[int, int] = {}
        """By the identity of a request, which lives at least until `release`."""
        self.held_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """The whole body; it stays counted until `release`.

        Raises:
            InvalidRequest: it cannot be decoded, or did not arrive in time.
            Overloaded: all bodies together are too many.
            web.HTTPRequestEntityTooLarge: it is over the server's own bound.
        """
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self._seconds):
                async for piece in request.content.iter_any():
                    self._hold(request, len(piece))
                    pieces.append(piece)
        except web.RequestPayloadError as error:
            raise InvalidRequest(
                f"the body is not what its headers say ({' '.join(str(error).split())});"
                " send it plain, without content-encoding"
            ) from error
        except TimeoutError as error:
            raise InvalidRequest(
                f"the body did not arrive within {self._seconds:g} s; send it faster"
            ) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self, request: web.Request) -> None:
        """The request was answered; its body is counted no more."""
        self.held_bytes -= self._held.pop(id(request), 0)

    def _hold(self, request: web.Request, nbytes: int) -> None:
        own = self._held.get(id(request), 0) + nbytes
        bytes_max = Limits().body_bytes_max
        if own > bytes_max:
            raise web.HTTPRequestEntityTooLarge(max_size=bytes_max, actual_size=own)
        if self.held_bytes + nbytes > self._bytes_max:
            raise Overloaded(
                f"request bodies of {self._bytes_max} bytes are under way; try again later"
            )
        self._held[id(request)] = own
        self.held_bytes += nbytes
