"""Whole engines in one process, with a relay between them instead of sidecars."""

from __future__ import annotations

import random
import threading
from typing import Any

from prometheus_client import CollectorRegistry

from pdcluster_engine.assembly import Assembly, assemble
from pdcluster_engine.model.loading import load_runner
from pdcluster_engine.sampling import SamplingParameters
from pdcluster_engine.submission import Submission
from pdcluster_engine.telemetry import Telemetry
from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.ids import Key, RankAddress, Role, mint_attempt
from support.ports import transfer_ports
from support.relay import Port, Relay
from support.sinks import Collected

BOOTSTRAP = RankAddress("127.0.0.1", 8998)
DECODE_ADDRESS = RankAddress("127.0.0.1", 9100)


class Running:
    """One engine's threads, started and ended by a test."""

    def __init__(self, config: EngineConfig) -> None:
        model = load_runner(
            config.model_source,
            dtype=config.dtype,
            mode=config.mode,
            threads=1,
            device=config.device,
        )
        self.registry = CollectorRegistry()
        self.parts: Assembly = assemble(config, model, telemetry=Telemetry(self.registry))
        self.bytes_per_token = model.layout.bytes_per_token
        self.threads = [
            threading.Thread(target=self.parts.loop.run, daemon=True),
            threading.Thread(target=self.parts.compute.run, daemon=True),
        ]
        if self.parts.gate is not None:
            self.threads.append(threading.Thread(target=self.parts.gate.run, daemon=True))
        for thread in self.threads:
            thread.start()
        self.parts.loop.open_link()

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def run(self, submission: Submission) -> Collected:
        sink = Collected()
        self.parts.engine.submit(submission, sink)
        return sink

    def close(self) -> None:
        self.parts.compute.shut_down()
        self.parts.loop.stop()
        if self.parts.gate is not None:
            self.parts.gate.shut_down()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        self.parts.inbox.close()


class Pair:
    """A prefill and a decode engine that can reach each other."""

    def __init__(
        self,
        folder: str,
        *,
        transport: str,
        model: str,
        mode: str,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> None:
        self.prefill_port = Port(f"{folder}/p", incarnation="inc-p", address=BOOTSTRAP)
        self.decode_port = Port(f"{folder}/d", incarnation="inc-d", address=DECODE_ADDRESS)
        self.relay = Relay(
            {BOOTSTRAP: self.prefill_port, RankAddress("127.0.0.1", 8999): self.decode_port}
        )
        self.relay.__enter__()
        shared = {
            "transport": transport,
            "model_source": model,
            "mode": mode,
            "dtype": dtype,
            "device": device,
        }
        self.prefill = Running(config(folder, Role.PREFILL, **shared))
        self.decode = Running(config(folder, Role.DECODE, **shared))
        self.relay.wait_joined()
        self._random = random.Random(5)

    def submission(self, prompt: tuple[int, ...], **changes: object) -> Submission:
        """A greedy leg under a fresh key; `bootstrap` makes it one of a pair."""
        room = self._random.randrange(1, 1 << 62)
        values: dict[str, object] = {
            "key": Key(room, mint_attempt(1_700_000_000_000, self._random.getrandbits(22))),
            "rid": f"rid-{room}",
            "token_ids": prompt,
            "sampling": SamplingParameters(temperature=0.0, logprobs=3),
            "output_tokens_max": 12,
            "bootstrap": BOOTSTRAP,
            "ignore_eos": True,
        }
        return Submission(**{**values, **changes})  # type: ignore[arg-type]  # by name, in tests

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.relay.__exit__(None, None, None)


def config(folder: str, role: Role, **settings: Any) -> EngineConfig:
    letter = role.value[0]
    return EngineConfig(
        cluster="test",
        instance=f"test-{role}-0",
        role=role,
        host="127.0.0.1",
        link_path=f"{folder}/{letter}",
        keys_folder=folder,
        served_name="tiny",
        max_context=1024,
        chunk=48,
        **transfer_ports(),
        scatter_seed=11 if role is Role.PREFILL else 12,
        **settings,
    )


def prompt(length: int) -> tuple[int, ...]:
    """The same bytes for the same length."""
    generator = random.Random(length)
    return tuple(generator.randrange(256) for _ in range(length))
