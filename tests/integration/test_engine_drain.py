"""SIGTERM at an engine that computes: what runs may end in time, nothing new begins."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdcluster_protocol.config import EngineConfig
from pdcluster_protocol.ids import RankAddress, Role
from pdcluster_protocol.limits import Timeouts
from support.legs import LegClient, prompt_of
from support.nursery import Nursery, deadline_in
from support.ports import fresh_host, transfer_ports
from support.promptness import PROMPT_SECONDS

pytestmark = pytest.mark.slow

HOST, PORT = fresh_host(), 30000
ENGINE = f"http://{HOST}:{PORT}"
TOKENS = 600
"""An answer that takes longer than everything that is measured beside it."""
_numbers = itertools.count()
"""Each engine has a log of its own."""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("n")) as warm:
        yield warm


class Draining:
    """An engine that got SIGTERM in the middle of one answer."""

    def __init__(self, nursery: Nursery, *, drain_seconds: float) -> None:
        self._nursery = nursery
        self.config = EngineConfig(
            cluster="test",
            instance=f"drained-{next(_numbers)}",
            role=Role.DECODE,
            host=HOST,
            http_port=PORT,
            link_path=str(nursery.folder / "link-drained"),
            keys_folder=str(nursery.folder / "keys"),
            model_source="builtin://tiny-llama",
            served_name="tiny",
            max_context=2048,
            timeouts=Timeouts(drain_seconds=drain_seconds),
            **transfer_ports(),
        )
        key = (nursery.folder / "keys" / "k1").read_bytes()
        self.client = LegClient(key, bootstrap=RankAddress(HOST, 8998))
        self.pid = nursery.fork(self.config)
        self.answer: asyncio.Task[Any]

    def body(self, tokens: int) -> dict[str, Any]:
        leg = self.client.leg(prompt_of(8), max_new_tokens=tokens, ignore_eos=True)
        return self.client.alone(leg)

    async def begin(self) -> None:
        """Until a token is there; then SIGTERM, and until the engine says that it drains."""
        await self._logs("serving")
        body = self.body(TOKENS)
        self.answer = asyncio.create_task(self.client.generate(ENGINE, body))
        generated = "pdcluster_tokens_generated_total"
        deadline = deadline_in(30)
        while not (await self.client.metrics(ENGINE)).get(generated):
            assert time.monotonic() < deadline
        os.kill(self.pid, signal.SIGTERM)
        await self._logs("draining")

    async def _logs(self, event: str) -> None:
        path, deadline = self._nursery.log_of(self.config), deadline_in(30)
        while event not in path.read_text():
            assert time.monotonic() < deadline, path.read_text()
            await asyncio.to_thread(os.sched_yield)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self._nursery.exit_of, self.pid)


async def test_a_running_answer_ends_whole_and_a_new_one_is_refused(nursery: Nursery) -> None:
    engine = Draining(nursery, drain_seconds=60)
    await engine.begin()
    refused = await engine.client.generate(ENGINE, engine.body(1))
    assert "ShuttingDown" == refused["error"]["code"]
    assert TOKENS == len((await engine.answer)["output_ids"])
    ended_at = time.monotonic()
    assert 0 == await engine.exit_code()
    assert time.monotonic() - ended_at < PROMPT_SECONDS


async def test_what_does_not_end_within_the_budget_is_cut_in_words(nursery: Nursery) -> None:
    engine = Draining(nursery, drain_seconds=0.05)
    await engine.begin()
    cut = (await engine.answer)["error"]
    assert "ShuttingDown" == cut["code"]
    assert cut["message"].endswith("shutting down; it did not end within 0.05 s")
    assert 0 == await engine.exit_code()


async def test_a_second_sigterm_ends_the_drain_at_once(nursery: Nursery) -> None:
    engine = Draining(nursery, drain_seconds=60)
    await engine.begin()
    begun = time.monotonic()
    os.kill(engine.pid, signal.SIGTERM)
    assert "ShuttingDown" == (await engine.answer)["error"]["code"]
    assert 0 == await engine.exit_code()
    assert time.monotonic() - begun < PROMPT_SECONDS
