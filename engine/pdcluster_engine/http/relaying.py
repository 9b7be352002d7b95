"""A sequence that came to the wrong DP rank is computed by the right one, and answered from here.

A router that knows only one port of an instance (SGLang's does) sends everything there. A body may
carry sequences of several ranks, so what is relayed is the parsed sequence, not the HTTP request:
the rank that was asked shapes the one answer, whoever computes its parts.

`POST /pd/v1/sequence` (`sequence_path`) takes one `Submission` as msgpack, signed with the
cluster's key whatever `security.interop` says. Its answer streams frames of what has gathered, one
a second at least; the last one says how it ended. The connection is the cancel: whichever end
leaves, the other ends the sequence. A rank takes what is its own and refuses the rest, so nothing
is relayed twice.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import aiohttp
import msgspec

from pdcluster_engine.submission import Engine, EngineState, Output, OutputSink, Submission
from pdcluster_protocol.authentication import HEADER, HttpSigner, KeyRing
from pdcluster_protocol.codec import Codec, FrameReader
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.errors import (
    Overloaded,
    Reason,
    RequestFailed,
    WireError,
    parse_reason,
)
from pdcluster_protocol.ids import Key, RankAddress
from pdcluster_protocol.undecodable import UNDECODABLE

SEQUENCE_PATH: Final = "/pd/v1/sequence"
RELAYED_MAX: Final = 4096
OWN_FAULT: Final = "a fault of this engine's own; its log says which"
SILENCE_SECONDS: Final = 10.0
"""A rank that sends no frame for so long is gone, or hangs."""
CONNECT_SECONDS: Final = 2.0
READ_BYTES: Final = 64 << 10
ERROR_BYTES_MAX: Final = 64 << 10


class Told(msgspec.Struct, frozen=True):
    """One frame: outputs since the last one, and the end when it has come."""

    outputs: tuple[Output, ...] = ()
    ended: bool = False
    reason: Reason | None = None
    """None: it ended well."""
    detail: str = ""


submissions: Final[Codec[Submission]] = Codec(Submission)
tellings: Final[Codec[Told]] = Codec(Told)


class RelayingEngine:
    """An `Engine` that hands sequences of other ranks to them; used from the event loop alone."""

    def __init__(
        self, engine: Engine, config: EngineConfig, *, addresses: tuple[RankAddress, ...]
    ) -> None:
        self._engine = engine
        self._config = config
        self._addresses = addresses
        self._signer: HttpSigner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._relayed: dict[int, _Relayed] = {}
        """By room, as at the rank that computes it."""

    def open(self, ring: KeyRing | None, *, session: str) -> None:
        """Make the client, inside the running loop; without a key every relay is refused."""
        self._signer = None if ring is None else HttpSigner(ring, session)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS
            ),
            # Bounded by `RELAYED_MAX`: each relayed sequence holds one connection.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
        )

    async def close(self) -> None:
        """End what is under way."""
        for relayed in list(self._relayed.values()):
            relayed.cancel(Reason.SHUTTING_DOWN, "this engine is shutting down")
        if self._session is not None:
            await self._session.close()

    def submit(self, submission: Submission, sink: OutputSink) -> None:
        """Take a sequence, or give it to its rank.

        Raises:
            Overloaded, RequestFailed: refused at once; nothing will reach the sink.
        """
        rank = submission.dp_rank
        if rank is None or rank == self._config.dp_rank:
            self._engine.submit(submission, sink)
            return
        key = submission.key
        if self._session is None or self._signer is None:
            raise RequestFailed(
                f"this sequence belongs to DP rank {rank}, and there is no key to sign it with;"
                " send it to that rank's port",
                reason=Reason.RANK_CONFLICT,
                key=key,
            )
        if key.room in self._relayed:
            raise RequestFailed(
                f"room {key.room} has a live request here; take another room",
                reason=Reason.ROOM_IN_USE,
                key=key,
            )
        if len(self._relayed) >= RELAYED_MAX:
            raise Overloaded(
                f"{RELAYED_MAX} sequences of other ranks are under way here; try again later",
                key=key,
            )
        relayed = _Relayed(submission, sink, rank=rank, address=self._addresses[rank])
        self._relayed[key.room] = relayed
        relayed.task = asyncio.get_running_loop().create_task(
            relayed.run(self._session, self._signer)
        )
        relayed.task.add_done_callback(partial(self._over, relayed))

    def _over(self, relayed: _Relayed, task: asyncio.Task[None]) -> None:
        self._relayed.pop(relayed.submission.key.room, None)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            relayed.end(Reason.INVARIANT_VIOLATED, OWN_FAULT)
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"relaying {relayed.submission.rid} failed here", "exception": fault}
            )

    def cancel(self, key: Key, reason: Reason, detail: str = "") -> None:
        """End a sequence, wherever it is computed."""
        relayed = self._relayed.get(key.room)
        if relayed is not None and relayed.submission.key == key:
            relayed.cancel(reason, detail)
        else:
            self._engine.cancel(key, reason, detail)

    def cancel_rid(self, rid: str, reason: Reason) -> bool:
        """End the one live sequence with exactly this rid, wherever it is computed."""
        found = [relayed for relayed in self._relayed.values() if relayed.submission.rid == rid]
        for relayed in found:
            relayed.cancel(reason, "aborted by its rid")
        return self._engine.cancel_rid(rid, reason) or bool(found)

    def state(self) -> EngineState:
        """Of this rank's own engine."""
        return self._engine.state()


class _Relayed:
    """One sequence that another rank computes; its sink gets exactly one end."""

    __slots__ = ("_authority", "_ended", "_place", "_sink", "submission", "task")

    def __init__(
        self, submission: Submission, sink: OutputSink, *, rank: int, address: RankAddress
    ) -> None:
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.submission = submission
        self.task: asyncio.Task[None] | None = None
        self._sink = sink
        self._authority = f"{host}:{address.port}"
        self._place = f"DP rank {rank} at {address}"
        self._ended = False

    async def run(self, session: aiohttp.ClientSession, signer: HttpSigner) -> None:
        """Ask, and pass on what comes until it ends."""
        url = f"http://{self._authority}{SEQUENCE_PATH}"
        body = submissions.encode(self.submission)
        signature = signer.sign("POST", SEQUENCE_PATH, body, authority=self._authority)
        try:
            async with session.post(
                url, data=body, headers={HEADER: signature}, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    self.end(*await _refusal(answer))
                    return
                await self._listen(answer)
            self.end(Reason.ENGINE_DIED, f"{self._place} closed the connection before the end")
        except WireError as error:
            self.end(error.reason, f"{self._place}: {error.detail}")
        except aiohttp.ClientConnectorError as error:
            self.end(Reason.PEER_UNREACHABLE, f"{self._place} is not reachable: {error.strerror}")
        except TimeoutError:
            self.end(Reason.STALLED, f"{self._place} was silent for {SILENCE_SECONDS:g} s")
        except (aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            self.end(Reason.ENGINE_DIED, f"{self._place} broke off: {what}")

    def cancel(self, reason: Reason, detail: str) -> None:
        """End it here at once; the closed connection ends it there."""
        self.end(reason, detail)
        if self.task is not None:
            self.task.cancel()

    async def _listen(self, answer: aiohttp.ClientResponse) -> None:
        reader = FrameReader()
        while chunk := await answer.content.read(READ_BYTES):
            for payload in reader.feed(chunk):
                told = tellings.decode(payload)
                if not self._ended:
                    for output in told.outputs:
                        self._sink.emit(output)
                if told.ended:
                    self.end(told.reason, told.detail)

    def end(self, reason: Reason | None, detail: str) -> None:
        """Tell the sink, once."""
        if self._ended:
            return
        self._ended = True
        if reason is None:
            self._sink.finished()
        else:
            self._sink.failed(reason, detail)


async def _refusal(answer: aiohttp.ClientResponse) -> tuple[Reason, str]:
    """Why the rank took it not, in its own words."""
    raw = await answer.content.read(ERROR_BYTES_MAX)
    try:
        error = msgspec.json.decode(raw, type=dict[str, dict[str, str | None]])["error"]
        return parse_reason(error["code"] or ""), error["message"] or ""
    except (*UNDECODABLE, KeyError):
        return Reason.PEER_FAILED, f"the sequence's rank answers with {answer.status}"
