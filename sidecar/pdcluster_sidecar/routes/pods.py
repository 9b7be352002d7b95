"""`/pd/v1/pod/…`: the other pods of our instance report to us, and ask what they are to do."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import msgspec
from aiohttp import web

from pdcluster_protocol.authentication import HEADER, HttpSigner
from pdcluster_protocol.control_api import (
    Orders,
    OrdersAsked,
    PodAnswer,
    PodCard,
    PodReport,
    decode_pod_body,
)
from pdcluster_protocol.errors import Reason, RemoteProtocolError, Unauthorized
from pdcluster_sidecar.ranks import Ranks
from pdcluster_sidecar.relay import Relay
from pdcluster_sidecar.routes.control import SESSION


def add(app: web.Application, *, ranks: Ranks, relay: Relay, signer: HttpSigner) -> None:
    """Register the paths."""
    paths = _Pods(ranks, relay, signer)
    app.router.add_post("/pd/v1/pod/report", paths.report)
    app.router.add_post("/pd/v1/pod/orders", paths.orders)


class _Pods:
    """The handlers."""

    def __init__(self, ranks: Ranks, relay: Relay, signer: HttpSigner) -> None:
        self._ranks = ranks
        self._relay = relay
        self._signer = signer

    async def report(self, request: web.Request) -> web.Response:
        """Take in what a pod knows, and say what became of it."""
        report = decode_pod_body(await request.read(), PodReport)
        self._require_ours(request, report.instance, report.pod)
        if report.cluster != self._ranks.plan.cluster:
            _refuse(f"cluster is {report.cluster!r}; this one is {self._ranks.plan.cluster!r}")
        return self._signed(request, self._take(report))

    async def orders(self, request: web.Request) -> web.Response:
        """Hold the call until there is something to do."""
        asked = decode_pod_body(await request.read(), OrdersAsked)
        self._require_ours(request, asked.instance, asked.pod)
        return self._signed(request, await self._ranks.pods.orders(asked))

    # --- details --------------------------------------------------------------------------------

    def _take(self, report: PodReport) -> PodAnswer:
        ranks, instance = self._ranks, self._ranks.instance
        pod = ranks.pods.of(report.pod)
        now = asyncio.get_running_loop().time()
        instance.heard(report.pod.node, now)
        for death in report.ended:
            if death.incarnation and death.incarnation == instance.incarnation:
                ranks.end(death.detail)
        answers = tuple(
            (hello.coordinate, ranks.join(hello, report.pod)) for hello in report.hellos
        )
        said = report.incarnation
        over = bool(said) and (instance.is_dead(said) or instance.incarnation not in ("", said))
        missing = []
        for place, pulse in report.pulses:
            member = instance.members.get(place)
            if member is None or member.pod != report.pod:
                missing.append(place)
            else:
                ranks.pulsed(place, pulse)
        for address in report.questions:
            self._relay.asked(pod, address)
        for dump in report.dumps:
            ranks.pods.described(report.pod, dump)
        return PodAnswer(
            session=ranks.plan.session,
            incarnation=instance.incarnation,
            over=over,
            answers=answers,
            missing=() if over else tuple(missing),
            drain=None if over else ranks.standing.order,
        )

    def _require_ours(self, request: web.Request, instance: str, pod: PodCard) -> None:
        plan = self._ranks.plan
        if pod.session != request[SESSION]:
            raise Unauthorized("the pod names another session than the one that signed for it")
        if plan.node != 0:
            _refuse(f"this is pod {plan.node} of {plan.instance}; only pod 0 leads")
        if instance != plan.instance:
            _refuse(f"instance is {instance!r}; this sidecar serves {plan.instance!r}")
        if not 1 <= pod.node < plan.nodes:
            _refuse(f"pod.node is {pod.node}; it must be in [1, {plan.nodes - 1}]")

    def _signed(self, request: web.Request, answer: PodAnswer | Orders) -> web.Response:
        body = msgspec.msgpack.encode(answer)
        signature = self._signer.sign_answer(request.headers[HEADER], body)
        return web.Response(
            body=body, content_type="application/msgpack", headers={HEADER: signature}
        )


def _refuse(detail: str) -> NoReturn:
    raise RemoteProtocolError(detail, reason=Reason.FINGERPRINT_MISMATCH)
