"""The two ends of one local stream: a header and the bytes go out, one answer per write comes back.

header   operation, destination address, bytes of one piece, pieces, stride      5 x u64
answer   operation, 0 applied or 1 refused                                       u64, u8
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import NamedTuple

from pdcluster_engine.memory.pieces import Pieces
from pdcluster_engine.transport.port import PIECES_MAX, WriteRequest

HEADER = struct.Struct("<QQQQQ")
ANSWER = struct.Struct("<QB")
TURN_BYTES = 8 << 20
ANSWER_BYTES_MAX = 1 << 20
"""What one link moves before the others have their turn."""
CHUNK_BYTES = 512 << 10
CHUNK_PIECES = 512
"""Buffers of one system call; the kernel takes 1,024."""


class LinkEnded(Exception):
    """The other end closed, or does not speak this protocol."""


class Answered(NamedTuple):
    """The end of one write."""

    operation: int
    ok: bool
    digest: int


class _Write(NamedTuple):
    operation: int
    header: bytes
    source: Pieces
    digest: int
    deadline: float


class OutgoingLink:
    """Writes to one peer, in order."""

    __slots__ = ("_answers", "_arena", "_sent", "_sock", "_unanswered", "_unsent")

    def __init__(self, sock: socket.socket, arena: memoryview) -> None:
        self._sock = sock
        self._arena = arena
        self._unsent: deque[_Write] = deque()
        self._unanswered: deque[_Write] = deque()
        self._sent = 0
        """Bytes of the first unsent write that are already out, its header included."""
        self._answers = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def add(self, request: WriteRequest, *, digest: int, deadline: float) -> None:
        """Queue one write; its source is read until its answer comes."""
        place = request.destination
        header = HEADER.pack(
            request.operation, place.offset, place.nbytes, place.count, place.stride
        )
        self._unsent.append(_Write(request.operation, header, request.source, digest, deadline))

    def deadline(self) -> float | None:
        """When the oldest write must have ended."""
        oldest = self._unanswered or self._unsent
        return oldest[0].deadline if oldest else None

    def send(self) -> bool:
        """Send one turn's bytes; `False` when nothing is left to send."""
        budget = TURN_BYTES
        while self._unsent and budget > 0:
            write = self._unsent[0]
            try:
                count = self._sock.sendmsg(self._next_views(write))
            except BlockingIOError:
                return True
            except OSError as error:
                raise LinkEnded(f"connection lost: {error.strerror}") from error
            self._sent += count
            budget -= count
            if self._sent == HEADER.size + write.source.total_nbytes:
                self._unanswered.append(self._unsent.popleft())
                self._sent = 0
        return bool(self._unsent)

    def _next_views(self, write: _Write) -> list[bytes] | list[memoryview]:
        if self._sent < HEADER.size:
            return [write.header[self._sent :]]
        return _views(self._arena, write.source, self._sent - HEADER.size)

    def answers(self) -> list[Answered]:
        """The writes that ended.

        Raises:
            LinkEnded: the peer closed; what is unanswered is told by `close`.
        """
        try:
            chunk = self._sock.recv(CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkEnded(f"connection lost: {error.strerror}") from error
        if not chunk:
            raise LinkEnded("the peer's transport ended")
        self._answers += chunk
        whole = len(self._answers) // ANSWER.size * ANSWER.size
        answered: list[Answered] = []
        for operation, status in ANSWER.iter_unpack(bytes(self._answers[:whole])):
            if not self._unanswered or self._unanswered[0].operation != operation:
                raise LinkEnded("the peer answered a write that was not made")
            write = self._unanswered.popleft()
            answered.append(Answered(write.operation, status == 0, write.digest))
        del self._answers[:whole]
        return answered

    def close(self) -> list[int]:
        """Close, and name the operations that have no answer."""
        self._sock.close()
        return [write.operation for write in (*self._unanswered, *self._unsent)]


class IncomingLink:
    """Writes of one peer into the own arena."""

    __slots__ = (
        "_answers",
        "_arena",
        "_base",
        "_header",
        "_operation",
        "_place",
        "_received",
        "_refused",
        "_sock",
    )

    def __init__(self, sock: socket.socket, arena: memoryview, *, base: int) -> None:
        self._sock = sock
        self._arena = arena
        self._base = base
        self._header = bytearray()
        self._operation = 0
        self._place = Pieces(0, 0)
        """Where in the arena the present write goes."""
        self._received = 0
        """Bytes of it that are there."""
        self._refused = False
        self._answers = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def receive(self) -> bool:
        """Apply one turn's bytes; `True` while answers wait for the socket.

        Raises:
            LinkEnded: the peer closed or reset the connection.
        """
        budget = TURN_BYTES
        try:
            while budget > 0:
                under_way = len(self._header) == HEADER.size
                budget -= self._receive_bytes() if under_way else self._receive_header()
                if len(self._header) == HEADER.size and self._received == self._place.total_nbytes:
                    self._answer()
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkEnded(f"connection lost: {error.strerror}") from error
        return self._send_answers()

    def close(self) -> None:
        """Close the socket; a write that is under way stays torn and unanswered."""
        self._sock.close()

    def _receive_header(self) -> int:
        chunk = self._sock.recv(HEADER.size - len(self._header))
        if not chunk:
            raise LinkEnded("the peer closed")
        self._header += chunk
        if len(self._header) == HEADER.size:
            self._operation, address, nbytes, pieces, stride = HEADER.unpack(self._header)
            self._place = place = Pieces(address - self._base, nbytes, pieces, stride)
            self._received = 0
            inside = place.offset >= 0 and place.end <= len(self._arena)
            self._refused = not inside or not 1 <= pieces <= PIECES_MAX
        return len(chunk)

    def _receive_bytes(self) -> int:
        if self._refused:
            left = self._place.total_nbytes - self._received
            count = len(self._sock.recv(min(left, CHUNK_BYTES)))
        else:
            views = _views(self._arena, self._place, self._received)
            count = self._sock.recvmsg_into(views)[0]
        if not count:
            raise LinkEnded("the peer closed")
        self._received += count
        return count

    def _answer(self) -> None:
        if len(self._answers) > ANSWER_BYTES_MAX:
            raise LinkEnded("the peer takes no answers")
        self._answers += ANSWER.pack(self._operation, int(self._refused))
        self._header.clear()

    def _send_answers(self) -> bool:
        while self._answers:
            try:
                sent = self._sock.send(self._answers)
            except BlockingIOError:
                return True
            except OSError as error:
                raise LinkEnded(f"connection lost: {error.strerror}") from error
            del self._answers[:sent]
        return False


def _views(arena: memoryview, pieces: Pieces, position: int) -> list[memoryview]:
    return pieces.views(arena, position, nbytes_max=CHUNK_BYTES, count_max=CHUNK_PIECES)
