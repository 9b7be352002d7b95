"""What lies in the memories of a world and moves between them; what may not happen there."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from pdcluster_protocol import effects as fx
from pdcluster_protocol import events as ev
from pdcluster_protocol.ids import Key
from pdcluster_protocol.push.prefill_rooms import PrefillRooms
from simulation.cast import Faults, Pod, Request
from simulation.memory import Memory, Shape


class Wires:
    """The part of a world that bytes see; `World` adds clocks, processes, clients and models."""

    random: random.Random
    faults: Faults
    shape: Shape
    pods: dict[str, Pod]
    requests: dict[Key, Request]
    violations: list[str]

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        raise NotImplementedError

    def jitter(self) -> float:
        raise NotImplementedError

    def give(self, pod: Pod, event: ev.Event) -> None:
        raise NotImplementedError

    def count(self, what: str, amount: int = 1) -> None:
        raise NotImplementedError

    def _check_read(self, index: int, memory: Memory, start: fx.StartDecode, tokens: int) -> None:
        for region, own in enumerate(memory.place.layout.regions):
            for token in range(tokens):
                page = start.pages[token // self.shape.layout.page_size]
                found = memory.read(region, token, page)
                if found != memory.expected(start.key, region, token):
                    self.violations.append(
                        f"decode rank {index} would read {found!r} as {own.name} of token {token}"
                    )

    def _write(self, pod: Pod, write: fx.Write) -> None:
        side = pod.node.side
        assert isinstance(side, PrefillRooms)
        owner = side.writing.owner(write.operation)
        assert owner is not None
        key, session = owner[0], pod.ranks[write.rank].session
        sent = _source_bytes(pod, write)
        fails = self.random.random() < self.faults.write_fails
        late = self.random.random() < self.faults.write_lands_late
        if late or not fails:
            delay = self.jitter() + (self.random.random() * 2 if late and fails else 0)
            self.later(delay, lambda: self._land(pod, write, key, session, sent, reported=fails))
        if fails:
            self.later(self.jitter(), lambda: self._done(pod, write, session, ok=False))

    def _done(self, pod: Pod, write: fx.Write, session: str, *, ok: bool, digest: int = 0) -> None:
        if pod.ranks[write.rank].session == session:
            event = ev.OperationDone(write.operation, ok, digest, "" if ok else "refused")
            self.give(pod, event)

    def _land(
        self,
        pod: Pod,
        write: fx.Write,
        key: Key,
        session: str,
        sent: bytes,
        *,
        reported: bool,
    ) -> None:
        """A living writer reads its pages only now; of a dead one come the bytes on the wire."""
        target, stride = self.pods["decode"], write.destination_stride
        rank = next((r for r in target.ranks if r.session == write.target), None)
        offset = write.destination_address - rank.memory.base if rank else -1
        reach = write.nbytes + (write.pieces - 1) * stride
        if rank is None or not rank.memory.holds(offset, reach):
            # Nothing is mapped there: the name is gone, or it came again with other memory.
            if not reported:
                self._done(pod, write, session, ok=False)
            return
        if pod.ranks[write.rank].session == session:
            sent = _source_bytes(pod, write)
        # Not of a try that was said to have failed: what it changes late, nobody can find.
        flips = self.random.random() < self.faults.flip and not reported
        self.count("flipped", int(flips))
        for index in range(write.pieces):
            piece = bytearray(sent[index * write.nbytes : (index + 1) * write.nbytes])
            if flips and index == write.pieces - 1:
                piece[-1] ^= 1
            at = offset + index * stride
            self._may_write(target, rank.memory.touched(at, len(piece)), key)
            rank.memory.content[at : at + len(piece)] = piece
        if not reported:
            self._done(pod, write, session, ok=True, digest=zlib.crc32(sent))

    def _may_write(self, target: Pod, touched: tuple[bool, set[int]], key: Key) -> None:
        """No byte lands in a page that its request does not hold (owned or in quarantine)."""
        metadata, pages = touched
        pool = target.node.ledger.slots if metadata else target.node.ledger.pool
        if self.requests[key].mismatched:
            self.violations.append(f"{key} was written for a prompt with other tokens")
        for page in pages:
            holder = pool.holder_of(page)
            if holder != key:
                self.violations.append(f"{key} landed in page {page} of {holder}")

    def _verify(self, pod: Pod, verify: fx.VerifyRun) -> None:
        rank = pod.ranks[verify.rank]
        if not rank.session:
            return
        digest = rank.memory.digest(verify.offset, verify.nbytes, verify.pieces, verify.stride)
        self.give(pod, ev.OperationDone(verify.operation, ok=True, digest=digest))

    def _read_metadata(self, pod: Pod, read: fx.ReadMetadata) -> None:
        rooms = {rank.memory.room(read.slot) for rank in pod.ranks}
        self.give(pod, ev.MetadataRead(read.key, rooms.pop() if len(rooms) == 1 else 0))


def _source_bytes(pod: Pod, write: fx.Write) -> bytes:
    memory = pod.ranks[write.rank].memory
    return memory.pieces(write.source_offset, write.nbytes, write.pieces, write.source_stride)
