"""One seed, one world: the real nodes of a pair under simulated time, network, memory and deaths.

Everything that a peer, a wire or a kernel may do is here: messages are delayed, lost, doubled and
overtaken; writes fail and land all the same, also after their writer is dead; processes die and
come back. The nodes are the production ones, and `invariants.check` runs after every event.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial

import msgspec

from pdcluster_protocol import effects as fx
from pdcluster_protocol import events as ev
from pdcluster_protocol import invariants
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress, mint_attempt
from pdcluster_protocol.limits import Limits, Timeouts
from pdcluster_protocol.messages import InstanceCard, PeerState, RankCard
from pdcluster_protocol.nodes import decode_node, prefill_node
from simulation.cast import Faults, Pod, Rank, Request
from simulation.memory import Memory, Shape
from simulation.wires import Wires

BOOTSTRAP = RankAddress("prefill", 8998)
TIMEOUTS = Timeouts(
    bootstrap_seconds=20, stall_seconds=8, transfer_seconds=40, abort_seconds=3, queue_seconds=10
)


class World(Wires):
    """The pair and everything around it; `run` plays until nothing is left to happen."""

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        shape: Shape | None = None,
        pages: int = 24,
        slots: int = 8,
        limits: Limits | None = None,
        abort_seconds: float = TIMEOUTS.abort_seconds,
        log: Callable[[float, str, object], None] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.shape = shape or Shape()
        self.faults = faults or Faults()
        self.now = 0.0
        self.requests: dict[Key, Request] = {}
        self.violations: list[str] = []
        self.counts: dict[str, int] = {}
        self.log = log
        self.hold: dict[str, float] = {}
        """Seconds by which a side's legs come later."""
        self.silent: set[str] = set()
        """Sides that hear nothing from the other."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._sizes = (pages, slots)
        self._limits = limits or Limits(run_bytes_max=96)
        self._timeouts = msgspec.structs.replace(TIMEOUTS, abort_seconds=abort_seconds)
        self.pods = {name: self._make_pod(name) for name in ("prefill", "decode")}
        for pod in self.pods.values():
            self._start(pod)

    # --- the clock ---

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, action))

    def run(self, *, until: float = 600.0, steps_max: int = 200_000) -> None:
        for _ in range(steps_max):
            if not self._queue or self._queue[0][0] > until:
                return
            self.now, _, action = heapq.heappop(self._queue)
            action()
        raise AssertionError("the world does not come to rest")

    def jitter(self) -> float:
        if self.faults.steady:
            return self.faults.delay_seconds
        return self.faults.delay_seconds * (0.5 + self.random.random())

    # --- pods ---

    def _make_pod(self, name: str, starts: int = 1) -> Pod:
        pages, slots = self._sizes
        setup = self.shape.setup(
            name,
            pages=pages,
            slots=slots,
            timeouts=self._timeouts,
            limits=self._limits,
            scatter_seed=self.random.getrandbits(32),
        )
        make = prefill_node if name == "prefill" else decode_node
        ranks = [
            Rank(
                Memory(
                    self.shape,
                    setup.parallel,
                    place,
                    pages,
                    slots,
                    base=(1 << 32) * starts + (1 << 40) * index,
                ),
                RankAddress(name, 9000 + index),
            )
            for index, place in enumerate(setup.ranks)
        ]
        return Pod(name, make(setup), ranks, f"{name}-{starts}", starts=starts)

    def _start(self, pod: Pod) -> None:
        for index, rank in enumerate(pod.ranks):
            self.give(pod, ev.Joined(pod.incarnation, rank.address, index))
        for index in range(len(pod.ranks)):
            self._new_session(pod, index)

    def _new_session(self, pod: Pod, index: int) -> None:
        rank = pod.ranks[index]
        rank.sessions += 1
        rank.session = self._session_name(pod, index)
        rank.memory.base += 1 << 24
        self.give(pod, ev.TransportReady(rank.session, rank.memory.base, index))

    def _session_name(self, pod: Pod, index: int) -> str:
        suffix = f"/{index}" if index else ""
        return f"{pod.incarnation}:{pod.ranks[index].sessions}{suffix}"

    def lose_transport(self, pod: Pod, index: int = 0) -> None:
        rank = pod.ranks[index]
        rank.session = ""
        rank.losses += 1
        losses = rank.losses
        self.give(pod, ev.TransportLost("fenced", index))

        def back() -> None:
            if self.pods[pod.name] is pod and rank.losses == losses:
                self._new_session(pod, index)

        self.later(self._session_pause(), back)

    def _session_pause(self) -> float:
        return 0.12

    def crash(self, name: str) -> None:
        """SIGKILL of an engine: its node and memory are gone, its sidecar tells the peer."""
        old = self.pods[name]
        for rank in old.ranks:
            rank.session = ""
        for request in self.requests.values():
            if name in request.legs and not request.ends[name]:
                self._ended(old, request, Reason.ENGINE_DIED)
        self.pods[name] = pod = self._make_pod(name, old.starts + 1)
        other = self.pods["decode" if name == "prefill" else "prefill"]
        dead = ev.PeerStateChanged(old.incarnation, PeerState.DEAD, "its engine is gone")
        self.later(self._news_seconds(), partial(self._give_to, other.name, dead))
        self._start(pod)

    def _news_seconds(self) -> float:
        return self.jitter() * 10

    def give(self, pod: Pod, event: ev.Event) -> None:
        """One event into a node; its effects into the world."""
        if self.pods.get(pod.name, pod) is not pod:
            return
        self._say(pod, "<-", event)
        for effect in pod.node.handle(event, self.now):
            self._say(pod, "->", effect)
            self._do(pod, effect)
        invariants.check(pod.node)
        pod.wake += 1
        wake, deadline = pod.wake, pod.node.deadline()
        if deadline is not None:
            self.later(
                max(0.0, deadline - self.now),
                lambda: self.give(pod, ev.Tick()) if pod.wake == wake else None,
            )

    def _give_to(self, name: str, event: ev.Event) -> None:
        """To whoever bears the name when it arrives."""
        self.give(self.pods[name], event)

    def _say(self, pod: Pod, arrow: str, what: object) -> None:
        if self.log is not None:
            self.log(self.now, f"{pod.name:7} {arrow}", what)

    # --- clients and the router ---

    def request(self, room: int, prompt_tokens: int, output_tokens: int = 4) -> Request:
        key = self._mint(room)
        request = self.requests[key] = Request(key, prompt_tokens, output_tokens)
        for name in ("prefill", "decode"):
            seconds = self.jitter() + self.hold.get(name, 0.0)
            self.later(seconds, partial(self._leg, name, request))
        if self.random.random() < self.faults.cancel:
            self.later(self.random.random() * 0.2, lambda: self.leave(request))
        return request

    def _mint(self, room: int) -> Key:
        return Key(room, mint_attempt(int(self.now * 1000) + 1, room))

    def _leg(self, name: str, request: Request) -> None:
        if any(request.ends.values()) and name not in request.legs:
            return
        request.legs.add(name)
        other = self.random.random() < self.faults.other_tokens and name == "prefill"
        request.mismatched |= other
        leg = ev.LegArrived(
            key=request.key,
            rid=f"rid-{request.key.room}",
            prompt_tokens=request.prompt_tokens,
            prompt_digest="other" if other else "same",
            output_tokens_max=request.output_tokens,
            bootstrap=BOOTSTRAP,
        )
        self.give(self.pods[name], leg)

    def leave(self, request: Request) -> None:
        """The client closes its connection: the router aborts both legs."""
        for name in ("prefill", "decode"):
            event = ev.LegCancelled(request.key, Reason.CLIENT_GONE, "the client left")
            self.later(self.jitter(), partial(self._give_to, name, event))

    def _ended(self, pod: Pod, request: Request, reason: Reason | None) -> None:
        request.ends[pod.name].append(reason)
        if reason is not None:
            other = "decode" if pod.name == "prefill" else "prefill"
            event = ev.LegCancelled(request.key, Reason.ABORTED, f"{pod.name} failed")
            self.later(self.jitter(), lambda: self.give(self.pods[other], event))

    # --- effects ---

    def _do(self, pod: Pod, effect: fx.Effect) -> None:
        match effect:
            case fx.Count() | fx.CountBytes() | fx.Report():
                self._note(effect)
            case fx.ResolvePeer():
                if self.random.random() >= self.faults.lose:
                    self.later(self.jitter(), lambda: self._resolve(pod))
            case fx.Send():
                self._send(pod, effect)
            case fx.ConcludeLeg():
                self._ended(pod, self.requests[effect.key], effect.reason)
            case fx.StartPrefill() | fx.StartDecode() | fx.StopCompute():
                self._compute(pod, effect)
            case _:
                self._move(pod, effect)

    def _note(self, effect: fx.Count | fx.CountBytes | fx.Report) -> None:
        match effect:
            case fx.Count():
                self.count(effect.what)
            case fx.CountBytes():
                self.count(effect.kind, effect.nbytes)
            case fx.Report():
                self.count(f"fault of ours: {effect.reason}")

    def _compute(self, pod: Pod, effect: fx.StartPrefill | fx.StartDecode | fx.StopCompute) -> None:
        match effect:
            case fx.StartPrefill():
                self._prefill(pod, effect, 0)
            case fx.StartDecode():
                self._decode(pod, effect)
            case fx.StopCompute():
                self.later(self.jitter(), lambda: self._stop(pod, effect.key))

    def _move(self, pod: Pod, effect: fx.Effect) -> None:
        match effect:
            case fx.Write():
                self._write(pod, effect)
            case fx.VerifyRun():
                self.later(self.jitter() / 4, lambda: self._verify(pod, effect))
            case fx.ReadMetadata():
                self.later(0.0, lambda: self._read_metadata(pod, effect))
            case fx.ClearMetadata():
                for rank in pod.ranks:
                    rank.memory.set_room(effect.slot, None)
            case fx.Fence():
                self.count("fence")
                for index in range(len(pod.ranks)):
                    seconds = 0.024 + (self.jitter() * 20 if index else 0.0)
                    self.later(seconds, partial(self.lose_transport, pod, index))
            case _:
                raise AssertionError(f"no world does {effect}")

    def count(self, what: str, amount: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + amount

    def _resolve(self, pod: Pod) -> None:
        prefill = self.pods["prefill"]
        card = InstanceCard(
            cluster="world",
            instance="prefill-0",
            role="prefill",
            incarnation=prefill.incarnation,
            session="s",
            http=BOOTSTRAP,
            ranks=tuple(
                RankCard(rank.memory.place.coordinate, rank.address, 30000)
                for rank in prefill.ranks
            ),
            parallel=self.shape.prefill,
            layout=self.shape.layout,
            spread=self.shape.spread,
            ready=True,
        )
        self.give(pod, ev.PeerResolved(BOOTSTRAP, card))

    def _send(self, pod: Pod, effect: fx.Send) -> None:
        copies = 1 + (self.random.random() < self.faults.double)
        for _ in range(copies):
            if effect.to.host in self.silent or self.random.random() < self.faults.lose:
                self.count("lost")
                continue
            event = ev.MessageArrived(effect.message, pod.incarnation, effect.to.port - 9000)
            self.later(self.jitter(), partial(self._give_to, effect.to.host, event))

    # --- the model ---

    def _prefill(self, pod: Pod, start: fx.StartPrefill, done: int) -> None:
        request = self.requests[start.key]
        if done == 0:
            pod.computing[start.key] = 1
        if pod.computing.get(start.key) != 1 or self.pods[pod.name] is not pod:
            return
        end = min(done + 6, request.prompt_tokens)
        for region in range(len(self.shape.layout.regions)):
            for rank in pod.ranks:
                self._compute_rows(rank.memory, start, region, range(done, end))
            self.give(pod, ev.RowsWritten(start.key, region, done, end))
        if end < request.prompt_tokens:
            self.later(self.jitter(), lambda: self._prefill(pod, start, end))
            return
        for rank in pod.ranks:
            rank.memory.set_room(start.slot, start.key)
        del pod.computing[start.key]
        self.give(pod, ev.PromptComputed(start.key))

    def _compute_rows(
        self, memory: Memory, start: fx.StartPrefill, region: int, tokens: range
    ) -> None:
        own = memory.own_region(region)
        if own is None:
            return
        for token in tokens:
            page = start.pages[token // self.shape.layout.page_size]
            memory.compute(start.key, own, token, page)

    def _stop(self, pod: Pod, key: Key) -> None:
        pod.computing.pop(key, None)
        self.give(pod, ev.ComputeStopped(key))

    def _decode(self, pod: Pod, start: fx.StartDecode) -> None:
        request = self.requests[start.key]
        for index, rank in enumerate(pod.ranks):
            self._check_read(index, rank.memory, start, request.prompt_tokens)
        request.decoded = True
        pod.computing[start.key] = 1
        seconds = self.jitter() * request.output_tokens + self.faults.answer_seconds
        self.later(seconds, lambda: self._answered(pod, start))

    def _answered(self, pod: Pod, start: fx.StartDecode) -> None:
        if not pod.computing.pop(start.key, None):
            return
        for index, rank in enumerate(pod.ranks):
            # Every token of the answer has read the whole prompt.
            self._check_read(index, rank.memory, start, self.requests[start.key].prompt_tokens)
        self.give(pod, ev.DecodeFinished(start.key))
