"""A sidecar reduced to its link: it answers hello, resolves one prefill and passes messages on.

No checks, no authentication: for tests of engines against each other with nothing between them.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from types import TracebackType

from pdcluster_protocol.codec import FrameReader, engine_to_sidecar, frame, sidecar_to_engine
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import RankAddress
from pdcluster_protocol.messages import (
    CancelLeg,
    DumpAnswered,
    EngineHello,
    EngineToSidecar,
    HelloAnswer,
    Inbound,
    InstanceCard,
    Load,
    Outbound,
    Pulse,
    RankCard,
    Resolve,
    Resolved,
    SidecarToEngine,
)

DEADLINE_SECONDS = 30.0


class Port:
    """One engine's place at the relay."""

    def __init__(
        self, path: str, *, incarnation: str, address: RankAddress, refused: str = ""
    ) -> None:
        self.incarnation = incarnation
        self.refused = refused
        self.address = address
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(1)
        self.peer: socket.socket | None = None
        self.reader = FrameReader()
        self.hello: EngineHello | None = None
        self.hellos = 0
        self.load = Load()
        self.draining = False
        self.pulses = 0
        self.dumps: list[bytes] = []

    def say(self, message: SidecarToEngine) -> None:
        if self.peer is not None:
            self.peer.sendall(frame(sidecar_to_engine.encode(message)))


class Relay:
    """A thread that joins the ports; `with Relay(...) as relay`."""

    def __init__(self, ports: dict[RankAddress, Port]) -> None:
        """`ports` by the bootstrap address under which an engine can be resolved."""
        self.ports = ports
        self.passed: list[object] = []
        self._by_address = {port.address: port for port in ports.values()}
        self._selector = selectors.DefaultSelector()
        self._changed = threading.Condition()
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self._selector.register(self._stop_read, selectors.EVENT_READ, None)
        for port in self.ports.values():
            self._selector.register(port.listener, selectors.EVENT_READ, port)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join(DEADLINE_SECONDS)
        for port in self.ports.values():
            port.listener.close()
            if port.peer is not None:
                port.peer.close()
        self._selector.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def wait_joined(self) -> None:
        """Until every engine has said hello."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(port.hello is not None for port in self.ports.values()),
                timeout=DEADLINE_SECONDS,
            )

    def wait_load(self, port: Port, *, pages_free: int) -> None:
        """Until an engine's pulse shows so many free pages."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: pages_free == port.load.pages_free, timeout=DEADLINE_SECONDS
            ), port.load

    def wait_pulses(self, port: Port, count: int) -> None:
        """Until an engine has said so many times more that it lives, twice a second."""
        with self._changed:
            wanted = port.pulses + count
            assert self._changed.wait_for(
                lambda: port.pulses >= wanted, timeout=DEADLINE_SECONDS + count
            )

    def cancel(self, port: Port, rid: str) -> None:
        """As a router's abort would."""
        port.say(CancelLeg(rid, None, Reason.ABORTED))

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(DEADLINE_SECONDS):
                if key.data is None:
                    return
                port: Port = key.data
                if key.fileobj is port.listener:
                    self._accept(port)
                else:
                    self._read(port)

    def _accept(self, port: Port) -> None:
        port.peer, _ = port.listener.accept()
        port.reader = FrameReader()
        self._selector.register(port.peer, selectors.EVENT_READ, port)

    def _read(self, port: Port) -> None:
        assert port.peer is not None
        try:
            chunk = port.peer.recv(1 << 18)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._selector.unregister(port.peer)
            port.peer.close()
            port.peer = None
            return
        for raw in port.reader.feed(chunk):
            message = engine_to_sidecar.decode(raw)
            with self._changed:
                self._take(port, message)
                self._changed.notify_all()

    def _take(self, port: Port, message: EngineToSidecar) -> None:
        match message:
            case EngineHello():
                port.hello = message
                port.hellos += 1
                port.say(HelloAnswer(port.incarnation, port.address, port.refused))
            case Resolve(host, number):
                self._resolve(port, RankAddress(host, number))
            case Outbound(to, inner):
                self.passed.append(inner)
                self._by_address[to].say(Inbound(inner, port.incarnation))
            case Pulse(_, load):
                port.load = load
                port.draining = message.draining
                port.pulses += 1
            case DumpAnswered(_, text):
                port.dumps.append(text)

    def _resolve(self, port: Port, bootstrap: RankAddress) -> None:
        found = self.ports.get(bootstrap)
        if found is None or found.hello is None:
            port.say(
                Resolved(
                    bootstrap.host, bootstrap.port, None, reason="PeerUnreachable", detail="nobody"
                )
            )
            return
        hello = found.hello
        card = InstanceCard(
            cluster="test",
            instance=hello.instance,
            role=hello.role,
            incarnation=found.incarnation,
            session=hello.session,
            http=bootstrap,
            ranks=(RankCard(hello.coordinate, found.address, hello.http_port),),
            parallel=hello.parallel,
            layout=hello.layout,
            fingerprint=hello.fingerprint,
            ready=True,
        )
        port.say(Resolved(bootstrap.host, bootstrap.port, card, trusted=True))
