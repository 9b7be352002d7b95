"""The router as a process: configuration, ports, signals, what it costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pdcluster_protocol.config import RouterConfig
from support.canned import (
    CLUSTER,
    DEADLINE_SECONDS,
    MODEL,
    CannedWorker,
    never,
    pair_of_workers,
    stream_then,
)
from support.nursery import cpu_seconds, resident_bytes
from support.ports import fresh_host
from support.promptness import PROMPT_SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]
RSS_BYTES_MAX = 70 << 20
IDLE_CPU_SHARE_MAX = 0.02


def write_config(folder: Path, workers: list[CannedWorker], **changes: Any) -> Path:
    keys = folder / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef0123456789abcdef")
    fields: dict[str, Any] = {
        "cluster": CLUSTER,
        "host": fresh_host(),
        "keys_folder": str(keys),
        "served_name": MODEL,
        "max_context": 512,
        "members": tuple(worker.member for worker in workers),
    }
    file = folder / "router.json"
    file.write_bytes(msgspec.json.encode(RouterConfig(**(fields | changes))))
    return file


async def spawn(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    path = os.pathsep.join(str(REPOSITORY / root) for root in ("protocol", "sidecar"))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdcluster_sidecar.router",
        *arguments,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def finished(*arguments: str, **environment: str) -> tuple[int, str, str]:
    process = await spawn(*arguments, **environment)
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def running(file: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router process that has a pair, and its URL."""
    config = json.loads(file.read_bytes())
    url = f"http://{config['host']}:8000"
    process = await spawn("--config", str(file))
    try:
        async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as session:
            assert process.stderr is not None
            await process.stderr.readuntil(b'"listening"')
            while True:
                async with session.get(url + "/ready") as response:
                    if response.status == 200:
                        break
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def workers() -> AsyncIterator[list[CannedWorker]]:
    pair = pair_of_workers()
    for worker in pair:
        await worker.start()
    yield pair
    for worker in pair:
        await worker.stop()


async def test_it_serves_and_stays_small_and_idle(
    tmp_path: Path, workers: list[CannedWorker]
) -> None:
    async with running(write_config(tmp_path, workers)) as (process, url):
        async with aiohttp.ClientSession() as session:
            for _ in range(50):
                async with session.post(url + "/v1/completions", json={"prompt": "hi"}) as answer:
                    assert 200 == answer.status
        before, began = cpu_seconds(process.pid), time.monotonic()
        # What an idle router does is to watch its members: three rounds of that.
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait([ended], timeout=3.0)
        assert not ended.done()
        ended.cancel()
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - began)

        assert share <= IDLE_CPU_SHARE_MAX
        assert resident_bytes(process.pid) <= RSS_BYTES_MAX


@pytest.mark.parametrize("busy", [False, True])
async def test_sigterm_ends_it_promptly(
    tmp_path: Path, workers: list[CannedWorker], *, busy: bool
) -> None:
    async with running(write_config(tmp_path, workers)) as (process, url):
        workers[1].behaviour = stream_then(events=1, end=never)
        async with aiohttp.ClientSession() as session:
            response = None
            if busy:
                body = {"prompt": "hi", "stream": True}
                response = await session.post(url + "/v1/completions", json=body)
                await response.content.readany()
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), PROMPT_SECONDS)

            assert 0 == process.returncode
            assert time.monotonic() - began < PROMPT_SECONDS
            if response is not None:
                rest = (await response.content.read()).decode()
                assert "ShuttingDown" in rest
                assert "[DONE]" not in rest
                await workers[1].wait_for(lambda: bool(workers[1].aborts))


async def test_every_line_of_its_log_says_whose_it_is(
    tmp_path: Path, workers: list[CannedWorker]
) -> None:
    async with running(write_config(tmp_path, workers)) as (process, url):
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json={"prompt": "hi"}) as answer,
        ):
            assert 200 == answer.status
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        rest = await asyncio.wait_for(process.stderr.read(), DEADLINE_SECONDS)

    # Behind the first line, of which a part was read before.
    lines = [json.loads(line) for line in rest.splitlines()[1:]]
    assert "concluded" in [line["event"] for line in lines]
    assert {"router"} == {line.get("role") for line in lines}
    assert 1 == len({line.get("instance") for line in lines} - {None})


async def test_it_shows_its_whole_configuration(tmp_path: Path) -> None:
    file = write_config(tmp_path, [])
    code, out, _ = await finished("--config", str(file), "--print-config")

    assert 0 == code
    assert msgspec.json.decode(file.read_bytes()) == msgspec.json.decode(out)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "truncated"),
        ('{"cluster":"c"}', "keys_folder"),
        ('{"cluster":"c","keys_folder":"k","served_name":"m","max_context":1,"prot":1}', "prot"),
    ],
)
async def test_a_wrong_file_is_refused_by_field(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    code, _, err = await finished("--config", str(file))

    assert 2 == code
    assert said in err
    assert 1 == len(err.strip().splitlines())


async def test_a_missing_file_and_missing_keys_are_named(tmp_path: Path) -> None:
    code, _, err = await finished("--config", str(tmp_path / "none.json"))
    assert (2, True) == (code, "none.json" in err)

    nowhere = str(tmp_path / "nowhere")
    code, _, err = await finished("--config", str(write_config(tmp_path, [], keys_folder=nowhere)))
    assert (2, True) == (code, "keys_folder" in err)


@pytest.mark.parametrize("name", ["port", "admin_port"])
async def test_a_busy_port_is_named(tmp_path: Path, name: str) -> None:
    host = fresh_host()
    holder = await asyncio.start_server(lambda _r, _w: None, host, 0)
    port = holder.sockets[0].getsockname()[1]
    file = write_config(tmp_path, [], host=host, **{name: port})
    code, _, err = await finished("--config", str(file))
    holder.close()
    await holder.wait_closed()

    assert 2 == code
    assert f"{name} is {port}" in err


async def test_two_processes_share_a_port_only_when_both_are_told_to(
    tmp_path: Path, workers: list[CannedWorker]
) -> None:
    host = fresh_host()
    for name in ("first", "second", "alone"):
        (tmp_path / name).mkdir()
    first = write_config(tmp_path / "first", workers, host=host, port_shared=True)
    second = write_config(
        tmp_path / "second", workers, host=host, port_shared=True, admin_port=8002
    )
    alone = write_config(tmp_path / "alone", workers, host=host, admin_port=8003)
    async with running(first) as (one, url), running(second) as (other, _):
        code, _, err = await finished("--config", str(alone))
        assert (2, True) == (code, "port is 8000" in err)
        one.kill()
        await one.wait()
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json={"prompt": "hi"}) as answer,
        ):
            assert 200 == answer.status
        assert other.returncode is None


async def test_it_does_not_outlive_a_parent_that_is_gone(tmp_path: Path) -> None:
    file = write_config(tmp_path, [])
    code, _, err = await finished("--config", str(file), PDCLUSTER_PARENT_PID="1")

    assert 2 == code
    assert "PDCLUSTER_PARENT_PID" in err
