"""Talking to a router over real HTTP, counters from metrics text, and what a terminal is shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from pdcluster_operator.plan import Plan
from pdcluster_protocol.authentication import HEADER, HttpVerifier, KeyRing
from pdcluster_protocol.errors import ConfigError, PDClusterError
from pdctl.__main__ import main
from pdctl.asking import curl, first_answer, only_model, printable, send_canaries
from pdctl.counters import Counters, parse, total
from pdctl.processes import ProcessPhase, ProcessSpec, ProcessState, RunSpec, RunState
from pdctl.starting import last_words
from pdctl.table import aligned, process_table
from pdctl.web import Unreachable, exchange

KEY = bytes(range(32))


class Canned(ThreadingHTTPServer):
    """Answers each path with what the test says and keeps what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str, bytes, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.command, self.path, body, self.headers.get(HEADER)))
        status, answer = self.server.answers.get(self.path, (404, b"nothing here"))
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def router() -> Iterator[Canned]:
    with Canned() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def spec_of(router: Canned, folder: Path) -> RunSpec:
    (folder / "keys").mkdir()
    (folder / "keys" / "local-1").write_bytes(KEY)
    return RunSpec(
        cluster="local",
        folder=str(folder),
        endpoint=router.url,
        admin=router.url,
        served_name="tiny-glm",
        processes=(),
    )


def events(*objects: object) -> bytes:
    lines = [b"data: " + msgspec.json.encode(item) + b"\n\n" for item in objects]
    return b": a comment\n\n" + b"".join(lines)


def test_generate_streams_text_and_asks_for_what_was_typed(
    router: Canned, capsys: pytest.CaptureFixture[str]
) -> None:
    router.answers["/v1/models"] = (200, b'{"data": [{"id": "tiny-glm"}]}')
    pieces = [{"choices": [{"text": text}]} for text in ("Hel", "lo\x1b[2J", "")]
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    router.answers["/v1/completions"] = (200, events(*pieces, usage) + b"data: [DONE]\n\n")

    assert 0 == main(["generate", "Hi", "--url", router.url + "/", "--max-tokens", "7"])

    assert "Hello\N{REPLACEMENT CHARACTER}[2J\n" == capsys.readouterr().out
    asked = msgspec.json.decode(router.asked[-1][2])
    assert ("tiny-glm", "Hi", 7, True) == (
        asked["model"],
        asked["prompt"],
        asked["max_tokens"],
        asked["stream"],
    )


@pytest.mark.parametrize(
    ("expected", "status", "body"),
    [
        (
            "answered 400: TooLarge: long",
            400,
            b'{"error": {"message": "long", "code": "TooLarge"}}',
        ),
        ("answered 502: gateway", 502, b"gateway"),
        ("PeerFailed: decode died", 200, events({"error": {"message": "decode died"}})),
        ("the stream ended without [DONE]", 200, events({"choices": []})),
    ],
)
def test_generate_ends_with_one_line_when_the_answer_is_an_error(
    expected: str, status: int, body: bytes, router: Canned, capsys: pytest.CaptureFixture[str]
) -> None:
    router.answers["/v1/completions"] = (status, body)

    assert 1 == main(["generate", "Hi", "--url", router.url, "--model", "m"])

    told = capsys.readouterr().err
    assert expected in told
    assert 1 == told.count("\n")


def test_wrong_flags_of_generate_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["generate", "Hi", "--url", "ftp://x", "--model", "m"])
    assert "it must be like http://" in capsys.readouterr().err
    assert 2 == main(["generate", "Hi", "--max-tokens", "0"])
    assert "--max-tokens is 0; it must be at least 1" in capsys.readouterr().err


def test_nobody_listening_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="does not answer"):
        exchange("GET", "http://127.0.0.1:1/", timeout_seconds=2)


def test_several_models_need_a_choice(router: Canned) -> None:
    router.answers["/v1/models"] = (200, b'{"data": [{"id": "a"}, {"id": "b"}]}')

    with pytest.raises(ConfigError, match="serves a, b; choose with --model"):
        only_model(router.url)


def test_a_canary_goes_through_every_pair_and_is_signed(
    router: Canned, tmp_path: Path, local_plan: Plan
) -> None:
    router.answers["/pd/v1/canary"] = (200, b"{}")

    seen = send_canaries(spec_of(router, tmp_path), local_plan)

    assert [("local-prefill-0", "local-decode-0")] == [pair[:2] for pair in seen]
    method, target, body, header = router.asked[-1]
    HttpVerifier(KeyRing({"local-1": KEY})).verify(
        header, method, target, body, authorities=(urlsplit(router.url).netloc,)
    )
    assert {"prefill": "local-prefill-0", "decode": "local-decode-0"} == msgspec.json.decode(body)


def test_a_canary_that_fails_names_its_pair(
    router: Canned, tmp_path: Path, local_plan: Plan
) -> None:
    router.answers["/pd/v1/canary"] = (502, b'{"error": {"message": "gone", "code": "PeerDied"}}')

    with pytest.raises(PDClusterError, match="local-prefill-0 -> local-decode-0 failed with 502"):
        send_canaries(spec_of(router, tmp_path), local_plan)


def test_the_first_prompt_is_answered_with_its_usage(router: Canned, tmp_path: Path) -> None:
    answer = {
        "choices": [{"text": "Paris", "index": 0}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1},
    }
    router.answers["/v1/completions"] = (200, msgspec.json.encode(answer))
    spec = spec_of(router, tmp_path)

    text, usage, _ = first_answer(spec)

    assert ("Paris", 5, 1) == (text, usage.prompt_tokens, usage.completion_tokens)
    assert f"curl {router.url}/v1/completions" in curl(spec)


METRICS = r"""
# HELP pdcluster_requests_total requests
pdcluster_requests_total{outcome="answered",reason=""} 3.0
pdcluster_requests_total{outcome="failed",reason="a \" , b"} 2.0
pdcluster_kv_bytes_total{kind="kv"} 1e6
pdcluster_kv_bytes_total{kind="metadata"} 7
other 1 1700000000
broken{ 1
"""


def test_counters_are_summed_by_name_and_labels() -> None:
    samples = list(parse(METRICS))

    assert 5 == total(samples, "pdcluster_requests_total")
    assert 3 == total(samples, "pdcluster_requests_total", outcome="answered")
    assert 1_000_000 == total(samples, "pdcluster_kv_bytes_total", kind="kv")
    assert 1 == total(samples, "other")


def test_the_line_of_counters_shows_rates() -> None:
    line = Counters(answered=2, tokens=30, kv_bytes=5_000_000).line(Counters(tokens=10), 2.0)

    assert "requests 2 answered, 0 not   tokens 30 (10/s)   KV moved 5.0 MB" == line


def test_the_table_shows_what_runs_and_what_does_not() -> None:
    spec = RunSpec(
        cluster="c",
        folder="/f",
        processes=(
            ProcessSpec(
                name="a",
                kind="sidecar",
                argv=("x",),
                instance="c-prefill-0",
                role="prefill",
                ports=("127.64.1.1:8998", "9000"),
            ),
        ),
    )
    state = ProcessState(name="a", phase=ProcessPhase.BACKOFF, restarts=2, last_exit=-9)

    table = process_table(spec, RunState(supervisor_pid=1, detached=False, processes=(state,)))

    line = table.splitlines()[1]
    assert line.split()[:5] == ["prefill", "c-prefill-0", "sidecar", "127.64.1.1:8998", "9000"]
    assert line.endswith("backoff, 2 restarts, last exit -9")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert "a    bb\nccc  d" == aligned([("a", "bb"), ("ccc", "d")])


@pytest.mark.parametrize(
    ("expected", "log"),
    [
        ("it wrote nothing", ""),
        ("the port is busy", "first\nthe port is busy\n"),
        ("end: ConfigError: no key", '{"event":"end","reason":"ConfigError","detail":"no key"}'),
    ],
)
def test_last_words_of_a_process_are_readable(expected: str, log: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "c-sidecar.log").write_text(log)

    assert expected == last_words(tmp_path, "c/sidecar")
    assert "it wrote no log" == last_words(tmp_path, "other")


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert "a\nü\N{REPLACEMENT CHARACTER}" == printable("a\nü\x07")
