"""Calls to other sidecars' HTTP side: signed, bounded, with a deadline; and to plain registries."""

from __future__ import annotations

from typing import Final

import aiohttp
import msgspec
import stamina
from yarl import URL

from pdcluster_protocol.authentication import HEADER, HttpSigner, HttpVerifier
from pdcluster_protocol.control_api import decode_body
from pdcluster_protocol.errors import Reason, RemoteProtocolError, WireError
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import InstanceCard, RankCard
from pdcluster_protocol.topology import Parallelism, RankCoordinate

HELLO_PATH: Final = "/pd/v1/hello"
CALL_SECONDS: Final = 2.0
ANSWER_BYTES_MAX: Final = 4 << 20
PLAIN_RANKS_MAX: Final = 256


# Its default hooks would log the arguments of calls, and count into a registry that nobody reads.
stamina.instrumentation.set_on_retry_hooks([])


class Unreachable(RemoteProtocolError):
    """Nobody answered, or not in time."""

    reason = Reason.PEER_UNREACHABLE


class Refused(RemoteProtocolError):
    """Somebody answered, and said no."""

    def __init__(self, detail: str, *, status: int, reason: Reason) -> None:
        super().__init__(detail, reason=reason)
        self.status = status


class PlainServer(msgspec.Struct, frozen=True):
    """What a plain SGLang registry says of its server."""

    attn_tp_size: int
    attn_cp_size: int
    dp_size: int
    pp_size: int
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    decode_allocation_policy: str = "early"
    prefill_http_port: int | None = None


class SidecarClient:
    """One HTTP session for all peers."""

    def __init__(self, signer: HttpSigner, verifier: HttpVerifier) -> None:
        self._signer = signer
        self._verifier = verifier
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=CALL_SECONDS),
            connector=aiohttp.TCPConnector(limit=256, limit_per_host=8, keepalive_timeout=15),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def hello(self, address: RankAddress, ours: InstanceCard) -> InstanceCard:
        """Tell a sidecar who we are; gives who it is, checked.

        Raises:
            Unreachable: no connection or no answer within the deadline.
            Refused: an answer that is no card.
            Unauthorized: the answer is not signed with a key of ours.
            WireError: the answer is undecodable, or signed by another than it names.
        """
        caller = stamina.AsyncRetryingCaller(
            attempts=2, timeout=CALL_SECONDS, wait_initial=0.1, wait_max=0.5
        )
        body = msgspec.json.encode(ours)
        request, status, raw, header = await caller(Unreachable, self._greet, address, body)
        if status != 200:
            reason = Reason.UNAUTHORIZED if status == 401 else Reason.PEER_FAILED
            said = raw[:200].decode("utf-8", "replace")
            raise Refused(
                f"{address} answers {HELLO_PATH} with {status}: {said}",
                status=status,
                reason=reason,
            )
        session = self._verifier.verify_answer(header, request, raw)
        card = decode_body(raw, InstanceCard)
        if card.session != session:
            raise WireError(f"{address} signs as another session than its card names")
        return card

    async def tell_leader(self, address: RankAddress, path: str, body: bytes) -> tuple[str, bytes]:
        """Call the leading pod of our instance; gives the session that answered, and its answer.

        Raises:
            Unreachable: no connection or no answer within the deadline.
            Refused: the leader says no.
            Unauthorized: the answer is not signed with a key of ours.
        """
        request = self._signer.sign("POST", path, body, authority=str(address))
        status, raw, header = await self._call("POST", address, path, body, request)
        if status != 200:
            said = raw[:200].decode("utf-8", "replace")
            raise Refused(
                f"the leader at {address} answers {path} with {status}: {said}",
                status=status,
                reason=Reason.PEER_FAILED,
            )
        return self._verifier.verify_answer(header, request, raw), raw

    async def plain_card(self, address: RankAddress) -> InstanceCard:
        """Make a card of what a plain SGLang registry tells; only where interop allows it.

        Raises:
            Unreachable: no connection or no answer within the deadline.
            Refused: the registry is not ready, or this is none.
            WireError: its answer is undecodable or too large.
        """
        server = decode_body(await self._route(address, (-1, -1, -1, -1)), PlainServer)
        sizes = (server.dp_size, server.attn_cp_size, server.attn_tp_size, server.pp_size)
        count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        if min(sizes) < 1 or count > PLAIN_RANKS_MAX:
            raise WireError(f"{address} names sizes {sizes}; at most {PLAIN_RANKS_MAX} ranks")
        cards = []
        dp, cp, tp, pp = sizes
        for index in range(count):
            place = RankCoordinate(
                index // (cp * tp * pp), index // (tp * pp) % cp, index // pp % tp, index % pp
            )
            raw = await self._route(address, (place.dp, place.cp, place.tp, place.pp))
            found = decode_body(raw, _PlainRank)
            http_port = (server.prefill_http_port or 0) + place.dp
            rank_address = RankAddress(found.rank_ip, found.rank_port)
            cards.append(RankCard(place, rank_address, http_port))
        early = server.decode_allocation_policy == "early"
        return InstanceCard(
            cluster="",
            instance=f"sglang:{address}",
            role="prefill",
            incarnation="",
            session="",
            http=address,
            wire_min=0,
            wire_max=0,
            ranks=tuple(cards),
            parallel=Parallelism(tp=tp * dp * cp, dp=dp, pp=pp, cp=cp),
            allocation="Early" if early else "PrefillComplete",
            ready=True,
        )

    async def _greet(self, address: RankAddress, body: bytes) -> tuple[str, int, bytes, str | None]:
        # Each try is signed anew: a repeated counter would be a replay.
        request = self._signer.sign("POST", HELLO_PATH, body, authority=str(address))
        return request, *await self._call("POST", address, HELLO_PATH, body, request)

    async def _route(self, address: RankAddress, place: tuple[int, int, int, int]) -> bytes:
        dp, cp, tp, pp = place
        target = (
            f"/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}"
            f"&target_tp_rank={tp}&target_pp_rank={pp}"
        )
        status, raw, _ = await self._call("GET", address, target, b"", None)
        if status != 200:
            reason = Reason.NOT_READY if status == 503 else Reason.PEER_FAILED
            said = raw[:200].decode("utf-8", "replace")
            raise Refused(
                f"{address} answers /route with {status}: {said}", status=status, reason=reason
            )
        return raw

    async def _call(
        self, method: str, address: RankAddress, target: str, body: bytes, header: str | None
    ) -> tuple[int, bytes, str | None]:
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = URL(f"http://{host}:{address.port}{target}", encoded=True)
        headers = {"content-type": "application/json"} | ({HEADER: header} if header else {})
        try:
            async with self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                raw = await answer.content.read(ANSWER_BYTES_MAX + 1)
                while not answer.content.at_eof() and len(raw) <= ANSWER_BYTES_MAX:
                    raw += await answer.content.read(ANSWER_BYTES_MAX + 1)
                if len(raw) > ANSWER_BYTES_MAX:
                    raise WireError(f"{address} answers with more than {ANSWER_BYTES_MAX} bytes")
                return answer.status, raw, answer.headers.get(HEADER)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"{address} does not answer: {what}") from error


class _PlainRank(msgspec.Struct, frozen=True):
    rank_ip: str
    rank_port: int
