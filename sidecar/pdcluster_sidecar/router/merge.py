"""Several sequences as one answer: samples (`n`), lists of prompts, batches of `/generate`.

Sequence i of a request belongs to prompt i // n. OpenAI's shapes get one list of choices with their
indices, and one usage in which each prompt counts once; `/generate` gets a list, or events that
carry the index. Whatever else an engine wrote into its objects stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from pdcluster_protocol.errors import WireError
from pdcluster_protocol.requests import Api
from pdcluster_protocol.undecodable import UNDECODABLE
from pdcluster_sidecar.router.replies import DONE

PREFIX = b"data: "
Fields = dict[str, msgspec.Raw]
KindT = TypeVar("KindT")


class MergedAnswer:
    """Whole answers, merged when all have come."""

    def __init__(self, api: Api, rid: str, *, prompt_count: int, n: int) -> None:
        self._api = api
        self._rid = rid
        self._n = n
        self.part_count = prompt_count * n
        self._parts: list[bytes] = [b""] * self.part_count

    def take(self, index: int, body: bytes) -> None:
        """The answer of sequence `index`."""
        self._parts[index] = body

    def body(self) -> bytes:
        """The one answer.

        Raises:
            WireError: an engine's answer is not of its API's shape.
        """
        if self._api is Api.GENERATE:
            return b"[" + b",".join(self._parts) + b"]"
        parts = [_fields(part) for part in self._parts]
        choices = [
            _with(choice, index=index)
            for index, part in enumerate(parts)
            for choice in _choices(part)
        ]
        usages = [_usage(part) for part in parts]
        merged = _with(parts[0], id=self._rid, choices=choices)
        if any(usages):
            merged["usage"] = merge_usage(usages, n=self._n)
        return msgspec.json.encode(merged)


class MergedStream:
    """Events of several streams, written as those of one."""

    def __init__(self, api: Api, rid: str, *, prompt_count: int, n: int) -> None:
        self._api = api
        self._rid = rid
        self._n = n
        self.part_count = prompt_count * n
        self._usages: list[dict[str, object]] = [{} for _ in range(self.part_count)]
        self._usage_event: Fields | None = None

    def rewrite(self, index: int, events: bytes) -> bytes:
        """Events of sequence `index` as the client is to see them; its end is kept back.

        Raises:
            WireError: an event is not of its API's shape.
        """
        return b"".join(
            PREFIX + msgspec.json.encode(rewritten) + b"\n\n"
            for payload in _payloads(events)
            if (rewritten := self._rewrite(index, payload)) is not None
        )

    def tail(self) -> bytes:
        """The last events: the sum of all usage, if it was asked for, and the end."""
        if self._usage_event is None:
            return DONE
        usage = merge_usage(self._usages, n=self._n)
        event = {**self._usage_event, "id": self._rid, "usage": usage}
        return PREFIX + msgspec.json.encode(event) + b"\n\n" + DONE

    def _rewrite(self, index: int, payload: bytes) -> dict[str, object] | None:
        fields = _fields(payload)
        if self._api is Api.GENERATE:
            return _with(fields, index=index)
        choices = _choices(fields)
        if not choices:
            self._usages[index] = _usage(fields)
            self._usage_event = fields
            return None
        return _with(
            fields,
            id=self._rid,
            choices=[_with(choice, index=index) for choice in choices],
        )


def merge_usage(usages: Iterable[dict[str, object]], *, n: int) -> dict[str, object]:
    """The usage of a whole request: each prompt once, every output token."""
    usages = list(usages)
    prompt = sum(_count(usage, "prompt_tokens") for usage in usages[::n])
    completion = sum(_count(usage, "completion_tokens") for usage in usages)
    return {
        **usages[0],
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _payloads(events: bytes) -> Iterator[bytes]:
    for event in events.split(b"\n\n"):
        if event.startswith(PREFIX) and (payload := event[len(PREFIX) :]) != b"[DONE]":
            yield payload


def _with(fields: Fields, **changed: object) -> dict[str, object]:
    return {**fields, **changed}


def _fields(raw: bytes) -> Fields:
    return _decode(raw, Fields)


def _choices(fields: Fields) -> list[Fields]:
    return _decode(fields["choices"], list[Fields]) if "choices" in fields else []


def _usage(fields: Fields) -> dict[str, object]:
    raw = fields.get("usage")
    if raw is None or bytes(raw) == b"null":
        return {}
    return _decode(raw, dict[str, object])


def _count(usage: dict[str, object], name: str) -> int:
    count = usage.get(name, 0)
    return count if isinstance(count, int) else 0


def _decode(raw: bytes | msgspec.Raw, kind: type[KindT]) -> KindT:
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNDECODABLE as error:
        raise WireError(f"decode's answer cannot be merged: {error}") from error
