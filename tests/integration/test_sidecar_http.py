"""The HTTP side of a real sidecar: SGLang's registry code by code, and our own signed paths."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from pdcluster_protocol.authentication import HttpSigner
from pdcluster_protocol.control_api import AbortRequest, LoadReport
from pdcluster_protocol.errors import Reason
from pdcluster_protocol.ids import Key, RankAddress, Role
from pdcluster_protocol.messages import CancelLeg, DumpAnswered, DumpRequested, InstanceCard
from support.plain_ranks import plain_body
from support.sidecars import KEY, REPOSITORY, RING, ROOTS, FakeEngine, SidecarProcess, running

SENTINEL = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
FIRST = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"


@pytest_asyncio.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[SidecarProcess]:
    """A prefill sidecar without an engine."""
    process = SidecarProcess(tmp_path / "p", Role.PREFILL)
    async with running(process):
        yield process


async def test_every_code_of_the_registry(sidecar: SidecarProcess) -> None:
    steps: list[tuple[str, str, bytes, int]] = [
        ("GET", "/health", b"", 200),
        ("GET", SENTINEL, b"", 503),
        ("GET", "/route", b"", 400),
        ("GET", FIRST.replace("target_tp_rank=0", "target_tp_rank=x"), b"", 400),
        ("PUT", "/route", b"{", 400),
        ("PUT", "/route", b"\x80\x04]\x94.", 400),
        ("PUT", "/route", plain_body(attn_tp_size=2), 200),
        ("PUT", "/route", plain_body(attn_tp_size=2), 200),
        ("GET", SENTINEL, b"", 503),
        ("PUT", "/route", plain_body(attn_tp_size=2, attn_tp_rank=1, page_size=32), 400),
        (
            "PUT",
            "/route",
            plain_body(attn_tp_size=2, attn_tp_rank=1, decode_allocation_policy="prefill_complete"),
            400,
        ),
        ("PUT", "/route", plain_body(attn_tp_size=2, attn_tp_rank=1), 200),
        ("GET", SENTINEL, b"", 200),
        ("GET", FIRST, b"", 200),
        ("GET", FIRST.replace("target_tp_rank=0", "target_tp_rank=7"), b"", 404),
        ("POST", "/route", b"{}", 405),
        ("DELETE", "/route", b"", 405),
        ("POST", "/register_dp_rank", b'{"bootstrap_room": 7, "dp_rank": 0}', 200),
        ("POST", "/register_dp_rank", b'{"bootstrap_room": "7"}', 400),
        ("POST", "/query_dp_ranks", b'{"bootstrap_rooms": [7, 8]}', 200),
        ("POST", "/query_dp_ranks", b"[]", 400),
        ("GET", "/query_dp_ranks", b"", 405),
    ]
    for method, target, body, status in steps:
        got, text = await sidecar.call(method, target, body, signed=True)
        assert status == got, (method, target, text)


async def test_registry_paths_need_a_signature_that_the_answer_names(
    sidecar: SidecarProcess,
) -> None:
    for method, target in (
        ("PUT", "/route"),
        ("GET", SENTINEL),
        ("POST", "/register_dp_rank"),
        ("POST", "/query_dp_ranks"),
    ):
        status, text = await sidecar.call(method, target, b"")
        assert 401 == status
        assert b"security.interop" in text
    assert 401 == (await sidecar.call("GET", "/pd/v1/load"))[0]
    assert 5.0 == await sidecar.metric("pdcluster_unauthorized_total")


async def test_a_recorded_registration_cannot_be_sent_again(sidecar: SidecarProcess) -> None:
    authority = str(sidecar.http)
    header = HttpSigner(RING, "recorded").sign("PUT", "/route", plain_body(), authority=authority)

    assert 200 == (await sidecar.call("PUT", "/route", plain_body(), header=header))[0]
    status, text = await sidecar.call("PUT", "/route", plain_body(), header=header)
    assert 401 == status
    assert b"replay" in text


async def test_interop_opens_the_registry_and_nothing_of_ours(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path / "p", Role.PREFILL, interop="Allow")
    async with running(sidecar):
        assert 200 == (await sidecar.call("PUT", "/route", plain_body()))[0]
        assert 200 == (await sidecar.call("GET", SENTINEL))[0]
        for target in ("/pd/v1/load", "/pd/v1/dump", "/pd/v1/tokenizer"):
            assert 401 == (await sidecar.call("GET", target))[0]


async def test_a_linked_engine_is_registered_and_ready(sidecar: SidecarProcess) -> None:
    assert 503 == (await sidecar.call("GET", "/ready"))[0]
    engine = FakeEngine(sidecar.config)
    await engine.open()

    assert 200 == (await sidecar.call("GET", "/ready"))[0]
    status, raw = await sidecar.call("GET", FIRST, signed=True)
    assert (200, {"rank_ip": sidecar.config.host, "rank_port": 9000}) == (
        status,
        msgspec.json.decode(raw),
    )
    # Nobody else may put itself in the place of a linked rank.
    assert 400 == (await sidecar.call("PUT", "/route", plain_body(rank_port=1), signed=True))[0]
    await engine.die()
    await sidecar.wait_metric("pdcluster_registered_ranks", 0.0)
    assert 503 == (await sidecar.call("GET", SENTINEL, signed=True))[0]


async def test_load_tokenizer_abort_and_dump(sidecar: SidecarProcess) -> None:
    assert 503 == (await sidecar.call("GET", "/pd/v1/tokenizer", signed=True))[0]
    engine = FakeEngine(sidecar.config)
    answer = await engine.open()

    _, raw = await sidecar.call("GET", "/pd/v1/load", signed=True)
    report = msgspec.json.decode(raw, type=LoadReport)
    assert (answer.incarnation, True, 7) == (
        report.incarnation,
        report.ready,
        report.loads[0].pages_free,
    )

    _, raw = await sidecar.call("GET", "/pd/v1/tokenizer", signed=True)
    files = {"tokenizer.json": base64.b64encode(b"{}").decode()}
    assert {"digest": "t1", "files": files} == msgspec.json.decode(raw)

    wanted = msgspec.json.encode(AbortRequest("r-1", Key(7, 8), Reason.CLIENT_GONE))
    status, raw = await sidecar.call("POST", "/pd/v1/abort", wanted, signed=True)
    assert (200, {"ranks": 1}) == (status, msgspec.json.decode(raw))
    assert CancelLeg("r-1", Key(7, 8), Reason.CLIENT_GONE) == await engine.receive(CancelLeg)
    nobody = msgspec.json.encode(AbortRequest(""))
    status, raw = await sidecar.call("POST", "/pd/v1/abort", nobody, signed=True)
    assert 400 == status
    assert b"names no leg" in raw

    asking = asyncio.create_task(sidecar.call("GET", "/pd/v1/dump", signed=True))
    asked = await engine.receive(DumpRequested)
    engine.send(DumpAnswered(asked.request, b'{"rooms": [7]}'))
    described = msgspec.json.decode((await asking)[1])
    assert {"rooms": [7]} == described["ranks"][0]["engine"]
    await engine.die()


async def test_a_router_gets_a_signed_card_and_is_no_peer(sidecar: SidecarProcess) -> None:
    card = InstanceCard(
        cluster="c",
        instance="router-0",
        role="router",
        incarnation="",
        session=sidecar.signer.session,
        http=RankAddress("127.0.0.1", 8000),
    )
    body = msgspec.json.encode(card)
    status, raw = await sidecar.call("POST", "/pd/v1/hello", body, signed=True)

    theirs = msgspec.json.decode(raw, type=InstanceCard)
    assert (200, "c-prefill-0", False) == (status, theirs.instance, theirs.ready)
    assert 0.0 == await sidecar.metric('pdcluster_peers{state="alive"}')


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"cluster": "other"}, 409), ({"session": "stolen"}, 401), ({"ranks": 7}, 400)],
)
async def test_a_bad_hello_is_refused(
    sidecar: SidecarProcess, changes: dict[str, Any], status: int
) -> None:
    fields: dict[str, Any] = {
        "cluster": "c",
        "instance": "x",
        "role": "decode",
        "incarnation": "i",
        "session": sidecar.signer.session,
        "http": ["127.0.0.1", 1],
    }
    body = msgspec.json.encode(fields | changes)

    assert status == (await sidecar.call("POST", "/pd/v1/hello", body, signed=True))[0]


async def test_a_body_over_the_limit_is_413(sidecar: SidecarProcess) -> None:
    body = b"x" * (5 << 20)

    assert 413 == (await sidecar.call("PUT", "/route", body, signed=True))[0]


@pytest.mark.parametrize(
    "head",
    [b"POST / HTTP/1.1\r\nContent-Length: -5\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n"]
    + [
        b"POST %b HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\nx-pd-auth: a\r\n"
        % path
        for path in (b"/pd/v1/hello", b"/route")
    ],
)
async def test_malformed_http_is_answered_and_not_logged(
    sidecar: SidecarProcess, head: bytes
) -> None:
    before = sidecar.log.read_bytes()
    host, port = sidecar.config.host, sidecar.config.http_port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head + b"Host: a\r\n\r\n{}")
    answer = await asyncio.wait_for(reader.readline(), 5)
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()

    assert b" 400 " in answer
    assert before == sidecar.log.read_bytes()


async def test_a_rank_that_does_not_fit_is_told_why(sidecar: SidecarProcess) -> None:
    engine = FakeEngine(sidecar.config, fingerprint="g")
    answer = await engine.open()

    assert "fingerprint is 'g'; this sidecar serves 'f'" == answer.refused
    await asyncio.wait_for(engine.closed.wait(), 5)
    await engine.die()


async def test_nonsense_on_the_link_closes_that_link_alone(sidecar: SidecarProcess) -> None:
    good = FakeEngine(sidecar.config)
    await good.open()
    for raw in (b"\x04\0\0\0nope", b"\xff\xff\xff\xff"):
        reader, writer = await asyncio.open_unix_connection(sidecar.config.link_path)
        writer.write(raw)
        assert b"" == await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()

    assert 200 == (await sidecar.call("GET", "/ready"))[0]
    await good.die()


async def test_sigterm_ends_it_cleanly_and_removes_the_socket(sidecar: SidecarProcess) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()

    assert 0 == await sidecar.stop(signal.SIGTERM)
    assert loop.time() - start < 2.0
    assert not Path(sidecar.config.link_path).exists()


async def test_it_stays_small_and_shows_no_secret(sidecar: SidecarProcess) -> None:
    status = Path(f"/proc/{sidecar.pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))

    assert int(resident.split()[1]) < 70 * 1024
    command = Path(f"/proc/{sidecar.pid}/cmdline").read_bytes()
    assert KEY not in command + sidecar.log.read_bytes()


def run_sidecar(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)
    return subprocess.run(
        [sys.executable, "-m", "pdcluster_sidecar", *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


async def test_what_is_wrong_at_start_is_named_in_one_line(sidecar: SidecarProcess) -> None:
    folder = sidecar.file.parent
    fields = msgspec.json.decode(sidecar.file.read_bytes())
    free = {"host": "127.0.0.2", "link_path": str(folder / "other")}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "control_port: "),
        ({"control_port": 19000}, "is served by another sidecar"),
        ({"control_port": 19000, "link_path": str(folder / "other")}, "http_port: "),
        (free | {"keys_folder": "/nonexistent"}, "keys_folder is '/nonexistent'"),
        (free | {"surprise": 1}, "unknown field `surprise`"),
        (free | {"link_path": str(folder / "keys")}, "is no socket"),
    ]
    for changes, what in cases:
        file = folder / "changed.json"
        file.write_bytes(msgspec.json.encode(fields | changes))
        done = await asyncio.to_thread(run_sidecar, "--config", str(file))
        assert 2 == done.returncode
        last = done.stderr.splitlines()[-1]
        assert last.startswith("pdcluster-sidecar: ")
        assert what in last


def test_the_configuration_is_printed_with_its_defaults(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path, Role.DECODE)
    done = run_sidecar("--config", str(sidecar.file), "--print-config")

    assert sidecar.config == msgspec.json.decode(done.stdout, type=type(sidecar.config))


def test_it_does_not_start_under_a_parent_that_is_gone(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path, Role.DECODE)
    done = run_sidecar("--config", str(sidecar.file), PDCLUSTER_PARENT_PID="1")

    assert 2 == done.returncode
    assert "it is gone" in done.stderr
