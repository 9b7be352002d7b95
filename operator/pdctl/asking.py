"""Asking a cluster: canaries through named pairs, a first prompt, and streams of tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdcluster_operator.plan import Plan
from pdcluster_protocol.authentication import HttpSigner
from pdcluster_protocol.errors import ConfigError, PDClusterError, Reason
from pdcluster_protocol.ids import Role
from pdcluster_protocol.undecodable import UNDECODABLE
from pdctl.processes import RunSpec
from pdctl.web import exchange, signer, stream

CANARY_SECONDS = 60.0
ANSWER_SECONDS = 300.0
PAIRS_MAX = 64
FIRST_PROMPT = "The capital of France is"
FIRST_TOKENS = 32
DONE = b"[DONE]"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Choice(msgspec.Struct, frozen=True):
    """One text, or one piece of it in a stream."""

    text: str = ""


class Completion(msgspec.Struct, frozen=True):
    """What is read of an answer of `/v1/completions`."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: dict[str, object] | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


def pairs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every prefill with every decode."""
    prefills = [pod.instance for pod in plan.pods if pod.role is Role.PREFILL]
    decodes = [pod.instance for pod in plan.pods if pod.role is Role.DECODE]
    return ((prefill, decode) for prefill in prefills for decode in decodes)


def send_canaries(spec: RunSpec, plan: Plan) -> list[tuple[str, str, float]]:
    """One short request through each pair, at most 64: (prefill, decode, seconds).

    Raises:
        PDClusterError: a pair did not answer rightly, named.
    """
    signed_by = signer(Path(spec.folder) / "keys")
    seen = []
    for prefill, decode in list(pairs(plan))[:PAIRS_MAX]:
        started = time.monotonic()
        answer = exchange(
            "POST",
            f"{spec.admin}/pd/v1/canary",
            {"prefill": prefill, "decode": decode},
            timeout_seconds=CANARY_SECONDS,
            signed_by=signed_by,
        )
        if answer.status != 200:
            raise PDClusterError(
                f"canary {prefill} -> {decode} failed with {answer.status}: {answer.message()}",
                reason=Reason.PEER_FAILED,
            )
        seen.append((prefill, decode, time.monotonic() - started))
    return seen


def first_answer(spec: RunSpec) -> tuple[str, Usage, float]:
    """The answer to the first prompt: text, usage, seconds.

    Raises:
        PDClusterError: the router answered with an error.
    """
    started = time.monotonic()
    text, usage = _first(spec, spec.endpoint, None)
    return text, usage, time.monotonic() - started


def answer_alone(spec: RunSpec) -> str:
    """The answer of one engine that prefills and decodes by itself: what the pair must equal.

    Raises:
        PDClusterError: the engine answered with an error.
    """
    engine = next(p for p in spec.processes if p.kind == "engine" and p.role == Role.DECODE)
    return _first(spec, f"http://{engine.ports[0]}", signer(Path(spec.folder) / "keys"))[0]


def _first(spec: RunSpec, url: str, signed_by: HttpSigner | None) -> tuple[str, Usage]:
    answer = exchange(
        "POST",
        f"{url}/v1/completions",
        request(spec.served_name, FIRST_PROMPT, FIRST_TOKENS),
        timeout_seconds=ANSWER_SECONDS,
        signed_by=signed_by,
    )
    if answer.status != 200:
        raise PDClusterError(
            f"the first prompt at {url} failed with {answer.status}: {answer.message()}",
            reason=Reason.PEER_FAILED,
        )
    completion = msgspec.json.decode(answer.body, type=Completion)
    text = completion.choices[0].text if completion.choices else ""
    return text, completion.usage or Usage()


def request(model: str, prompt: str, max_tokens: int) -> dict[str, object]:
    """A greedy completion, so that everybody sees the same answer."""
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def curl(spec: RunSpec) -> str:
    """A line to copy and paste."""
    body = msgspec.json.encode(request(spec.served_name, FIRST_PROMPT, FIRST_TOKENS)).decode()
    quoted = body.replace("'", "'\\''")
    return f"curl {spec.endpoint}/v1/completions -H 'content-type: application/json' -d '{quoted}'"


def only_model(url: str) -> str:
    """The name of the one model that a router serves.

    Raises:
        ConfigError: there are several, or none.
        PDClusterError: no such answer.
    """
    answer = exchange("GET", f"{url}/v1/models", timeout_seconds=ANSWER_SECONDS)
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data
    except UNDECODABLE as error:
        raise PDClusterError(
            f"{url}/v1/models answered {answer.status}: {answer.message()}",
            reason=Reason.PEER_FAILED,
        ) from error
    if len(models) != 1:
        names = ", ".join(model.id for model in models) or "none"
        raise ConfigError(f"{url} serves {names}; choose with --model")
    return models[0].id


def generate(url: str, body: dict[str, object]) -> Usage:
    """Stream one completion to standard output as it comes.

    Raises:
        PDClusterError: the answer is an error, before or inside the stream.
    """
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    usage = Usage()
    for event in stream(f"{url}/v1/completions", asked, timeout_seconds=ANSWER_SECONDS):
        if event == DONE:
            break
        piece = msgspec.json.decode(event, type=Completion)
        if piece.error is not None:
            print()
            raise PDClusterError(
                str(piece.error.get("message", piece.error)), reason=Reason.PEER_FAILED
            )
        usage = piece.usage or usage
        for choice in piece.choices:
            sys.stdout.write(printable(choice.text))
            sys.stdout.flush()
    else:
        print()
        raise PDClusterError("the stream ended without [DONE]", reason=Reason.PEER_FAILED)
    print()
    return usage


def printable(text: str) -> str:
    """Text without control characters, which a random model emits and a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
