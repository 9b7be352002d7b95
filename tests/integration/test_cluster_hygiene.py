"""Hostile neighbours of a running pair: every open port at once, and the next request works."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import zmq

from pdcluster_protocol.authentication import HEADER
from pdcluster_protocol.ids import Role
from support.cluster import PairCluster, until

SEED = 20261201
STRANGERS = 40
"""Connections to each HTTP port; five kinds of them, two thirds of them stay."""
MESSAGES = 300
GROWTH_BYTES_MAX = 64 << 20
DESCRIPTORS_MORE_MAX = 12
"""Kept-alive connections between our own processes come and go."""
IDS, TOKENS = list(range(7, 90)), 8
BEGINNINGS = (
    b"",
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-le",
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b" " * 90_000,
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffff\r\n",
    b"POST /pd/v1/hello HTTP/1.1\r\nhost: x\r\nx-pd-auth: a\r\ncontent-length: 99\r\n\r\n{",
    b"\x16\x03\x01\x02\0" + b"\0" * 300,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PairCluster]:
    with PairCluster(model="tiny-llama") as running:
        yield running


def pids(cluster: PairCluster) -> dict[str, int]:
    """Every process of ours, transfer processes among them."""
    found = {state.name: state.pid for state in cluster.state().processes if not state.warm}
    return found | {f"transfer {role}": cluster.transfer_pid(role) for role in Role}


def resident_bytes(cluster: PairCluster) -> dict[str, int]:
    return {
        name: int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        for name, pid in pids(cluster).items()
    }


def descriptors(cluster: PairCluster) -> dict[str, int]:
    return {
        name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids(cluster).items()
    }


def http_ports(cluster: PairCluster) -> list[tuple[str, int]]:
    urls = [cluster.run.endpoint, cluster.run.admin]
    urls += [spec.ready_url for kind in ("engine", "sidecar") for spec in cluster.specs(kind)]
    return [(str(parts.hostname), int(parts.port or 0)) for parts in map(urlsplit, urls)]


@contextmanager
def strangers(cluster: PairCluster) -> Iterator[None]:
    """Slow, silent, half-open and talkative clients of every HTTP port and of the links."""
    with ExitStack() as stack:
        for address in http_ports(cluster):
            for number in range(STRANGERS):
                stranger = stack.enter_context(socket.create_connection(address, timeout=20))
                stranger.sendall(BEGINNINGS[number % len(BEGINNINGS)])
                if number % 7 == 0:
                    stranger.shutdown(socket.SHUT_WR)
        for link in filter(Path.is_socket, Path(cluster.run.folder).rglob("*link*")):
            for number in range(STRANGERS):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(str(link))
                stranger.sendall((b"", b"\xff" * 64, b"\4\0\0\0\x91\x91\x91\x91")[number % 3])
        yield


def shout(cluster: PairCluster) -> None:
    """Messages that mean nothing, to every control port."""
    dice = random.Random(SEED)
    context = zmq.Context()
    try:
        for spec in cluster.specs("sidecar"):
            sock = context.socket(zmq.PUSH)
            sock.set(zmq.SNDTIMEO, 20_000)
            sock.set(zmq.LINGER, 5000)
            sock.connect(f"tcp://{urlsplit(spec.ready_url).hostname}:9000")
            for _ in range(MESSAGES):
                sock.send_multipart([dice.randbytes(dice.randrange(200)) for _ in range(5)])
            sock.close()
    finally:
        context.term()


async def test_every_port_under_fire_and_the_next_request_gives_the_same_tokens(
    cluster: PairCluster,
) -> None:
    expected = await cluster.generate(IDS, TOKENS)
    assert expected.clear
    await cluster.wait_idle()
    memory, open_before = resident_bytes(cluster), descriptors(cluster)

    with strangers(cluster):
        await asyncio.to_thread(shout, cluster)
        for _ in range(3):
            assert expected.ids == (await cluster.generate(IDS, TOKENS)).ids
        assert await cluster.ready()

    async def closed() -> bool:
        now = descriptors(cluster)
        return all(now[name] <= count + DESCRIPTORS_MORE_MAX for name, count in open_before.items())

    await until(closed, "the strangers' connections are closed")
    await cluster.wait_idle()
    assert expected.ids == (await cluster.generate(IDS, TOKENS)).ids
    grown = {name: count - memory[name] for name, count in resident_bytes(cluster).items()}
    assert max(grown.values()) < GROWTH_BYTES_MAX, grown


async def test_what_was_signed_for_one_engine_is_refused_by_the_other(
    cluster: PairCluster,
) -> None:
    prefill, decode = (cluster.address(role, "engine") for role in (Role.PREFILL, Role.DECODE))
    authority = urlsplit(decode).netloc
    body = b'{"rid": ""}'
    header = cluster._signer.sign("POST", "/abort_request", body, authority=authority)
    async with aiohttp.ClientSession() as session:
        statuses = []
        for url in (prefill, decode, decode):
            async with session.post(
                f"{url}/abort_request", data=body, headers={HEADER: header}
            ) as answer:
                statuses.append(answer.status)
    assert [401, 200, 401] == statuses
