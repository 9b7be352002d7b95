"""The engine's end of the link against a real unix socket."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_engine.link import REDIAL_SECONDS_MAX, Link, LinkRefused, LinkState
from pdcluster_protocol.codec import FrameReader, engine_to_sidecar, frame, sidecar_to_engine
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import (
    EngineHello,
    EngineToSidecar,
    HelloAnswer,
    Load,
    Pulse,
    Resolve,
    SidecarToEngine,
)
from support.greetings import greeting

ADDRESS = RankAddress("127.0.0.1", 9000)


class Sidecar:
    """The listening end, one connection at a time, blocking with a deadline."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listen()
        self.peer: socket.socket | None = None

    def listen(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(5)
        self.listener.bind(self.path)
        self.listener.listen(1)

    def accept(self) -> None:
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(5)
        self.reader = FrameReader()

    def take(self, count: int) -> list[EngineToSidecar]:
        assert self.peer is not None
        found: list[EngineToSidecar] = []
        while len(found) < count:
            chunk = self.peer.recv(65536)
            assert chunk
            found += [engine_to_sidecar.decode(raw) for raw in self.reader.feed(chunk)]
        return found

    def say(self, message: SidecarToEngine) -> None:
        assert self.peer is not None
        self.peer.sendall(frame(sidecar_to_engine.encode(message)))

    def drop(self) -> None:
        assert self.peer is not None
        self.peer.close()

    def close(self) -> None:
        self.listener.close()
        if self.peer is not None:
            self.peer.close()


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    with tempfile.TemporaryDirectory() as folder:
        served = Sidecar(f"{folder}/link")
        yield served
        served.close()


def make_link(path: str, *, queue_max: int = 100) -> Link:
    link = Link(path, hello=lambda: greeting(link.incarnation), queue_max=queue_max)
    link.open(0.0)
    return link


def join(link: Link, sidecar: Sidecar, *, now: float = 0.0, incarnation: str = "i1") -> EngineHello:
    link.dial_if_due(now)
    sidecar.accept()
    (hello,) = sidecar.take(1)
    assert isinstance(hello, EngineHello)
    sidecar.say(HelloAnswer(incarnation, ADDRESS))
    receive(link, now)
    return hello


def receive(link: Link, now: float) -> list[SidecarToEngine]:
    # The bytes are in the kernel once `sendall` has returned.
    return link.receive(now)


def test_hello_goes_first_and_messages_only_after_its_answer(sidecar: Sidecar) -> None:
    link = make_link(sidecar.path)
    link.send(Resolve("h", 1))
    link.dial_if_due(0.0)
    link.flush(0.0)
    sidecar.accept()
    (hello,) = sidecar.take(1)
    assert "" == getattr(hello, "incarnation", None)
    assert 1 == link.queued
    sidecar.say(HelloAnswer("i1", ADDRESS))
    assert [HelloAnswer("i1", ADDRESS)] == link.receive(0.0)
    link.flush(0.0)
    assert [Resolve("h", 1)] == sidecar.take(1)
    assert LinkState.JOINED is link.state
    link.close()


def test_an_absent_sidecar_is_dialled_again_with_growing_pauses() -> None:
    link = make_link("/nonexistent/link")
    now, pauses = 0.0, []
    for _ in range(8):
        link.dial_if_due(now)
        due = link.deadline()
        assert due is not None
        pauses.append(round(due - now, 3))
        now = due
    assert [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, REDIAL_SECONDS_MAX] == pauses


def test_before_open_nothing_is_dialled(sidecar: Sidecar) -> None:
    link = Link(sidecar.path, hello=lambda: greeting(""), queue_max=1)
    link.dial_if_due(100.0)
    assert -1 == link.fileno()
    assert link.deadline() is None


def test_a_restarted_sidecar_gets_the_incarnation_and_what_waited(sidecar: Sidecar) -> None:
    link = make_link(sidecar.path)
    join(link, sidecar)
    sidecar.drop()
    sidecar.close()
    assert [] == link.receive(1.0)
    assert LinkState.DOWN is link.state
    link.send(Resolve("while-down", 2))
    sidecar.listen()
    due = link.deadline()
    assert due is not None
    hello = join(link, sidecar, now=due)
    assert "i1" == hello.incarnation
    link.flush(due)
    assert [Resolve("while-down", 2)] == sidecar.take(1)
    link.close()


def test_over_the_bound_the_oldest_message_goes_and_is_counted(sidecar: Sidecar) -> None:
    link = make_link(sidecar.path, queue_max=2)
    for port in range(1, 5):
        link.send(Resolve("h", port))
    join(link, sidecar)
    link.flush(0.0)
    assert [Resolve("h", 3), Resolve("h", 4)] == sidecar.take(2)
    assert 2 == link.dropped
    link.close()


def test_a_refusal_names_what_the_sidecar_said(sidecar: Sidecar) -> None:
    link = make_link(sidecar.path)
    link.dial_if_due(0.0)
    sidecar.accept()
    sidecar.say(HelloAnswer("", ADDRESS, refused="fingerprint differs"))
    with pytest.raises(LinkRefused, match="fingerprint differs"):
        link.receive(0.0)
    link.close()


def test_another_incarnation_is_a_refusal_since_peers_know_our_rooms_as_dead(
    sidecar: Sidecar,
) -> None:
    link = make_link(sidecar.path)
    join(link, sidecar)
    sidecar.drop()
    link.receive(0.0)
    with pytest.raises(LinkRefused, match="i1"):
        join(link, sidecar, now=1.0, incarnation="i2")
    link.close()


def test_garbage_from_the_sidecar_ends_the_connection_and_not_the_process(
    sidecar: Sidecar,
) -> None:
    link = make_link(sidecar.path)
    join(link, sidecar)
    assert sidecar.peer is not None
    sidecar.peer.sendall(frame(b"\xc1 is no msgpack"))
    assert [] == link.receive(0.0)
    assert LinkState.DOWN is link.state
    link.close()


def test_a_slow_reader_gets_everything_in_order(sidecar: Sidecar) -> None:
    link = make_link(sidecar.path, queue_max=10_000)
    join(link, sidecar)
    for loops in range(10_000):
        link.send(Pulse(loops, load=Load()))
    link.flush(0.0)
    assert link.wants_write
    seen: list[EngineToSidecar] = []
    while len(seen) < 10_000:
        seen += sidecar.take(1)
        link.flush(0.0)
    assert list(range(10_000)) == [pulse.loops for pulse in seen if isinstance(pulse, Pulse)]
    link.close()


def test_the_socket_is_not_inherited_by_children(sidecar: Sidecar) -> None:
    link = make_link(sidecar.path)
    join(link, sidecar)
    assert not os.get_inheritable(link.fileno())
    link.close()
