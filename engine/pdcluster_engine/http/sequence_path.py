"""`POST /pd/v1/sequence`: a sequence of ours that came to another rank of our instance.

The theory stands in `relaying`, whose other end this is.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from pdcluster_engine.http.door import Door
from pdcluster_engine.http.mailbox import Ended, Item, Mailbox
from pdcluster_engine.http.relaying import Told, submissions, tellings
from pdcluster_engine.submission import Engine, Output, Submission
from pdcluster_protocol.authentication import HEADER
from pdcluster_protocol.codec import frame
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import NotReady, RankConflict, Reason, Unauthorized

BEAT_SECONDS: Final = 1.0
"""A frame leaves at least so often, so that either end notices when the other is gone."""


class SequencePath:
    """Computes what the other ranks of the instance hand over."""

    def __init__(self, engine: Engine, config: EngineConfig, *, door: Door) -> None:
        self._engine = engine
        self._config = config
        self._door = door

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Stream what comes of one sequence.

        Raises:
            PDClusterError: it is refused; the other rank passes the reason on.
        """
        body, signed = await self._door.read(request)
        if not signed:
            raise Unauthorized(
                f"header {HEADER} is missing; only ranks of the same instance send sequences here"
            )
        submission = submissions.decode(body)
        self._require_ours(submission)
        mailbox = Mailbox()
        self._engine.submit(submission, mailbox.sink(0))
        ended = False
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/msgpack"})
            await response.prepare(request)
            while not ended:
                told = _told(await self._gathered(mailbox))
                ended = told.ended
                async with asyncio.timeout(self._config.timeouts.stall_seconds):
                    await response.write(frame(tellings.encode(told)))
            await response.write_eof()
        except TimeoutError as error:
            raise ConnectionResetError(
                "the relaying rank took no byte for the stall time"
            ) from error
        finally:
            if not ended:
                detail = "the rank that relayed this sequence closed its connection"
                self._engine.cancel(submission.key, Reason.CLIENT_GONE, detail)
        return response

    def _require_ours(self, submission: Submission) -> None:
        own = self._config.dp_rank
        if submission.dp_rank != own:
            raise RankConflict(
                f"the sequence belongs to DP rank {submission.dp_rank}; this is rank {own}, and a"
                " relayed sequence is not relayed again: the ranks' rank_addresses differ"
            )
        if submission.bootstrap is not None and not self._engine.state().joined:
            raise NotReady(f"DP rank {own} has not joined its sidecar yet; try again later")

    @staticmethod
    async def _gathered(mailbox: Mailbox) -> list[Item]:
        """What came of it within a beat, maybe nothing."""
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                return await mailbox.take()
        except TimeoutError:
            return []


def _told(items: list[Item]) -> Told:
    outputs = tuple(item for _, item in items if isinstance(item, Output))
    ends = [item for _, item in items if isinstance(item, Ended)]
    if not ends:
        return Told(outputs)
    return Told(outputs, ended=True, reason=ends[0].reason, detail=ends[0].detail)
