"""Our own paths under `/pd/v1/`: hello, load, abort, dump, tokenizer. All of them are signed."""

from __future__ import annotations

import asyncio
import base64
from typing import Final

import msgspec
from aiohttp import web

from pdcluster_protocol.authentication import HEADER, HttpSigner
from pdcluster_protocol.control_api import HELD_SECONDS, AbortRequest, decode_body
from pdcluster_protocol.errors import (
    InvalidRequest,
    NotReady,
    Reason,
    RemoteProtocolError,
    Unauthorized,
)
from pdcluster_protocol.messages import CancelLeg, InstanceCard
from pdcluster_protocol.topology import RankCoordinate
from pdcluster_protocol.undecodable import UNDECODABLE
from pdcluster_sidecar.peers import Peer
from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.relay import Relay
from pdcluster_sidecar.telemetry import Metrics

SESSION: Final = "pd-session"
"""Under this key a request holds the session that signed it."""


def add(
    app: web.Application, *, ranks: Ranks, relay: Relay, metrics: Metrics, signer: HttpSigner
) -> None:
    """Register the paths."""
    paths = _Control(ranks, relay, metrics, signer)
    app.router.add_post("/pd/v1/hello", paths.hello)
    app.router.add_post("/pd/v1/abort", paths.abort)
    app.router.add_get("/pd/v1/load", paths.load)
    app.router.add_get("/pd/v1/dump", paths.dump)
    app.router.add_get("/pd/v1/tokenizer", paths.tokenizer)


class _Control:
    """The handlers."""

    def __init__(self, ranks: Ranks, relay: Relay, metrics: Metrics, signer: HttpSigner) -> None:
        self._ranks = ranks
        self._relay = relay
        self._metrics = metrics
        self._signer = signer

    async def hello(self, request: web.Request) -> web.Response:
        """Who is there: a card for a card."""
        theirs = decode_body(await request.read(), InstanceCard)
        if theirs.session != request[SESSION]:
            raise Unauthorized("the card names another session than the one that signed it")
        ours = self._ranks.card()
        if theirs.cluster != ours.cluster:
            raise RemoteProtocolError(
                f"cluster is {theirs.cluster!r}; this sidecar belongs to {ours.cluster!r}",
                reason=Reason.FINGERPRINT_MISMATCH,
            )
        body = msgspec.json.encode(self._relay.answer_hello(theirs))
        await self._relay.pods_know()
        # Signed too, and bound to this request: the caller must know whom it trusts.
        signature = self._signer.sign_answer(request.headers[HEADER], body)
        return web.Response(body=body, content_type="application/json", headers={HEADER: signature})

    async def load(self, request: web.Request) -> web.Response:
        """What each DP rank can still take; held while all is as the caller knows it."""
        incarnation = request.query.get("while_ready", "")
        if incarnation:
            await self._ranks.standing.while_ready(incarnation, HELD_SECONDS)
        now = asyncio.get_running_loop().time()
        return _json(self._ranks.instance.load_report(now))

    async def abort(self, request: web.Request) -> web.Response:
        """End one leg by its exact name, on every rank of this instance."""
        wanted = decode_body(await request.read(), AbortRequest)
        if not wanted.rid and wanted.key is None:
            raise InvalidRequest(
                "rid is empty and there is no key: that names no leg; send the exact rid or key",
                field="rid",
            )
        told = self._ranks.to_all(CancelLeg(wanted.rid, wanted.key, wanted.reason))
        self._metrics.cancels.inc()
        return _json({"ranks": told})

    async def dump(self, _: web.Request) -> web.Response:
        """Rooms, ranks, pages and peers, as each part describes itself."""
        return _json(_describe(self._ranks, self._relay, await self._ranks.dump()))

    async def tokenizer(self, _: web.Request) -> web.Response:
        """The engine's own files, so that a router needs no model folder."""
        digest, files = self._ranks.instance.tokenizer
        if not files:
            raise NotReady("no rank has joined yet, so there is no tokenizer")
        encoded = {name: base64.b64encode(raw).decode() for name, raw in files.items()}
        return _json({"digest": digest, "files": encoded})


def _describe(
    ranks: Ranks, relay: Relay, engines: dict[RankCoordinate, bytes]
) -> dict[str, object]:
    now = asyncio.get_running_loop().time()
    card = ranks.card()
    return {
        "instance": card.instance,
        "role": card.role,
        "incarnation": card.incarnation,
        "session": card.session,
        "ready": card.ready and not card.draining,
        "draining": card.draining,
        "node": ranks.plan.node,
        "unready": ranks.unready(),
        "fingerprint": card.fingerprint,
        "registered": ranks.registry.registered,
        "peers": [_describe_peer(peer, now) for peer in relay.peers.all()],
        "ranks": [
            {
                "dp_rank": place.dp,
                "cp_rank": place.cp,
                "tp_rank": place.tp,
                "pp_rank": place.pp,
                "node": member.pod.node,
                "loops": member.pulse.loops,
                "moved_seconds_ago": round(now - member.moved_at, 3),
                "load": member.pulse.load,
                "draining": member.pulse.draining,
                # Its own JSON as it is; null while it does not answer.
                "engine": _raw(engines.get(place)),
            }
            for place, member in sorted(ranks.instance.members.items())
        ],
    }


def _describe_peer(peer: Peer, now: float) -> dict[str, object]:
    return {
        "instance": peer.card.instance,
        "role": peer.card.role,
        "incarnation": peer.card.incarnation,
        "state": peer.state,
        "detail": peer.node.detail,
        "heard_seconds_ago": round(now - peer.node.heard_at, 3),
        "http": str(peer.card.http),
        "ranks": len(peer.card.ranks),
        "draining": peer.draining,
    }


def _raw(described: bytes | None) -> object:
    """The engine's JSON, checked: a broken one must not break the whole answer."""
    if described is None:
        return None
    try:
        return msgspec.json.decode(described)
    except UNDECODABLE:
        return "undecodable"


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
