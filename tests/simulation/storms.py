"""Worlds with worse weather: what one request in a million meets, met by every second one.

A `Storm` adds to the faults of a world: messages that come many seconds late, sidecars that are
deaf for a second, deaths that nobody tells, processes that come back under their old names, fences
in rows, models and verifications that fail or never end, cancels before legs, engines that drain,
room numbers that come again while they live, and routers that are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from pdcluster_protocol import effects as fx
from pdcluster_protocol import events as ev
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, mint_attempt
from pdcluster_protocol.limits import Limits
from simulation.cast import Faults, Pod, Request
from simulation.memory import Shape
from simulation.world import World

DEAF_SECONDS = 1.0


@dataclass(frozen=True)
class Storm(Faults):
    """Probabilities a message, operation, request or pod; seconds; sizes."""

    straggle: float = 0.0
    """A message comes within `straggle_seconds`, in half of the cases as a double."""
    straggle_seconds: float = 3.0
    deaf: float = 0.0
    """A pod's sidecar is restarted: for `DEAF_SECONDS` nothing comes and nothing goes."""
    untold: float = 0.0
    """A death is told only after up to 12 s."""
    old_names: bool = False
    """A restarted decode has its old session names, and more pages."""
    times: int = 1
    """How often each pod may crash, and lose its transport."""
    session_seconds: float = 0.12
    write_hangs: float = 0.0
    prefill_hangs: float = 0.0
    model_fails: float = 0.0
    verify_late: float = 0.0
    verify_fails: float = 0.0
    cancel_first: float = 0.0
    """The cancel overtakes both legs."""
    prefill_late: float = 0.0
    drain: float = 0.0
    rooms: int = 0
    """Room numbers are drawn from so few; 0: each comes once."""
    router: bool = True
    """False: nobody ends the other leg."""
    pages: int = 24
    slots: int = 8
    abort_seconds: float = 3.0
    clock_seconds: float = 0.0
    """How far the clocks of routers are apart."""
    limits: Limits = field(default_factory=lambda: Limits(run_bytes_max=96))


class StormyWorld(World):
    """A world in a storm."""

    def __init__(self, seed: int, storm: Storm, shape: Shape | None = None) -> None:
        self.storm = storm
        self.deaf_until = {"prefill": 0.0, "decode": 0.0}
        super().__init__(
            seed,
            storm,
            shape=shape,
            pages=storm.pages,
            slots=storm.slots,
            limits=storm.limits,
            abort_seconds=storm.abort_seconds,
        )

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability

    # --- pods ---

    def _make_pod(self, name: str, starts: int = 1) -> Pod:
        if self.storm.old_names and name == "decode":
            self._sizes = (self.storm.pages + 3 * (starts - 1), self.storm.slots)
        return super()._make_pod(name, starts)

    def _session_name(self, pod: Pod, index: int) -> str:
        if self.storm.old_names:
            return f"{pod.name}/{index}:{pod.ranks[index].sessions % 3}"
        return super()._session_name(pod, index)

    def lose_transport(self, pod: Pod, index: int = 0) -> None:
        if self.pods.get(pod.name) is pod:
            super().lose_transport(pod, index)

    def _session_pause(self) -> float:
        return self.storm.session_seconds

    def _news_seconds(self) -> float:
        if self.happens(self.storm.untold):
            return self.random.random() * 12
        return super()._news_seconds()

    def deafen(self, name: str) -> None:
        self.deaf_until[name] = self.now + DEAF_SECONDS

    # --- clients and routers ---

    def _mint(self, room: int) -> Key:
        clock = self.now + 1000 + (2 * self.random.random() - 1) * self.storm.clock_seconds
        return Key(room, mint_attempt(int(clock * 1000), self.random.getrandbits(22)))

    def request(self, room: int, prompt_tokens: int, output_tokens: int = 4) -> Request:
        held = self.happens(self.storm.prefill_late)
        self.hold["prefill"] = self.random.random() * 5 if held else 0.0
        request = super().request(room, prompt_tokens, output_tokens)
        if self.happens(self.storm.cancel_first):
            self.leave(request)
        return request

    def _ended(self, pod: Pod, request: Request, reason: Reason | None) -> None:
        if self.storm.router:
            super()._ended(pod, request, reason)
        else:
            request.ends[pod.name].append(reason)

    # --- wires, memory, model ---

    def _send(self, pod: Pod, effect: fx.Send) -> None:
        if self.now < max(self.deaf_until[pod.name], self.deaf_until[effect.to.host]):
            self.count("unheard")
            return
        if self.happens(self.storm.straggle):
            self.count("late")
            event = ev.MessageArrived(effect.message, pod.incarnation, effect.to.port - 9000)
            seconds = self.random.random() * self.storm.straggle_seconds
            self.later(seconds, partial(self._give_to, effect.to.host, event))
            if self.happens(0.5):
                return
        super()._send(pod, effect)

    def _resolve(self, pod: Pod) -> None:
        if self.now >= self.deaf_until[pod.name]:
            super()._resolve(pod)

    def _write(self, pod: Pod, write: fx.Write) -> None:
        if not self.happens(self.storm.write_hangs):
            super()._write(pod, write)

    def _verify(self, pod: Pod, verify: fx.VerifyRun) -> None:
        if self.happens(self.storm.verify_late):
            self.later(self.random.random() * 6, lambda: World._verify(self, pod, verify))
        elif self.happens(self.storm.verify_fails):
            self.give(pod, ev.OperationDone(verify.operation, ok=False, detail="unreadable"))
        else:
            super()._verify(pod, verify)

    def _prefill(self, pod: Pod, start: fx.StartPrefill, done: int) -> None:
        if done == 0 and self.happens(self.storm.prefill_hangs):
            pod.computing[start.key] = 1
        elif pod.computing.get(start.key) and self.happens(self.storm.model_fails):
            del pod.computing[start.key]
            self.give(pod, ev.ComputeStopped(start.key, Reason.MODEL_FAILED, "out of memory"))
        else:
            super()._prefill(pod, start, done)
