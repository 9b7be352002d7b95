"""One rank's two neighbours as the owner loop sees them: its link to the sidecar, its transport.

An engine has one port for each rank of its data-parallel rank. All of them are waited for by one
selector and touched by one thread.
"""

from __future__ import annotations

import selectors
from collections.abc import Sequence

from pdcluster_engine.link import Link, LinkState
from pdcluster_engine.transport.port import Transport


class RankPort:
    """A link, a transport, and what is known of both."""

    __slots__ = ("_watched", "index", "link", "transport", "transport_ready")

    def __init__(self, index: int, link: Link, transport: Transport) -> None:
        self.index = index
        """The rank's unique number, by which node and messages name it."""
        self.link = link
        self.transport = transport
        self.transport_ready = False
        self._watched: tuple[int, int] | None = None
        """Descriptor and events under which the link is registered."""

    @property
    def joined(self) -> bool:
        """Whether the sidecar has answered this rank's hello."""
        return self.link.state is LinkState.JOINED

    def open(self, selector: selectors.BaseSelector) -> None:
        """Start the transport and wait for it."""
        selector.register(self.transport.fileno(), selectors.EVENT_READ)
        self.transport.start()

    def close(self) -> None:
        """End link and transport."""
        self.link.close()
        self.transport.close()

    def watch_link(self, selector: selectors.BaseSelector) -> None:
        """Register what the link waits for; between two connections a turn sees none."""
        descriptor = self.link.fileno()
        wanted: tuple[int, int] | None = None
        if descriptor >= 0:
            events = selectors.EVENT_READ | (self.link.wants_write and selectors.EVENT_WRITE)
            wanted = (descriptor, events)
        if wanted == self._watched:
            return
        if self._watched is not None:
            selector.unregister(self._watched[0])
        if wanted is not None:
            selector.register(*wanted)
        self._watched = wanted


def queued(ports: Sequence[RankPort]) -> int:
    """Messages that wait for a link."""
    return sum(port.link.queued for port in ports)


def dropped(ports: Sequence[RankPort]) -> int:
    """Messages that went over a link's bound."""
    return sum(port.link.dropped for port in ports)
