"""A router reduced to its legs: signed `/generate` calls straight to the engines."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pdcluster_protocol.authentication import HEADER, HttpSigner, KeyRing
from pdcluster_protocol.ids import RankAddress, mint_attempt

TIMEOUT = aiohttp.ClientTimeout(total=60)


class LegClient:
    """Makes legs and sends them; `engines` are base URLs."""

    def __init__(self, key: bytes, *, bootstrap: RankAddress) -> None:
        self._signer = HttpSigner(KeyRing({"k1": key}), "test-router")
        self._bootstrap = bootstrap
        self._random = random.Random(3)

    def leg(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """A greedy leg under a fresh room and attempt."""
        return {
            "rid": f"pd-{self._random.getrandbits(60):x}",
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 16, **sampling},
            "return_logprob": True,
            "bootstrap_host": self._bootstrap.host,
            "bootstrap_port": self._bootstrap.port,
            "bootstrap_room": self._random.randrange(1, 1 << 62),
            "pd_attempt": mint_attempt(time.time_ns() // 1_000_000, self._random.getrandbits(22)),
            "pd_budget_seconds": 20.0,
        }

    @staticmethod
    def alone(leg: dict[str, Any]) -> dict[str, Any]:
        """The same request without a partner."""
        return {name: leg[name] for name in ("input_ids", "sampling_params", "return_logprob")}

    async def generate(self, engine: str, body: dict[str, Any], *, signed: bool = True) -> Any:
        raw = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if signed:
            headers[HEADER] = self._signer.sign(
                "POST", "/generate", raw, authority=urlsplit(engine).netloc
            )
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.post(f"{engine}/generate", data=raw, headers=headers) as answer,
        ):
            return await answer.json()

    async def run_pair(self, prefill: str, decode: str, leg: dict[str, Any]) -> tuple[Any, Any]:
        first, second = await asyncio.gather(
            self.generate(prefill, leg), self.generate(decode, leg)
        )
        return first, second

    async def ready(self, engine: str) -> bool:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.get(f"{engine}/ready") as answer,
        ):
            return answer.status == 200

    async def metrics(self, engine: str) -> dict[str, float]:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.get(f"{engine}/metrics") as answer,
        ):
            lines = (await answer.text()).splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}


def prompt_of(length: int) -> list[int]:
    """The same random bytes for the same length."""
    generator = random.Random(length)
    return [generator.randrange(256) for _ in range(length)]
