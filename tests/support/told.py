"""What a client was told, in a form that two answers to one question share.

Ids and times differ by nature and are left out. A stream is its choices' pieces in order; of
`/generate`, whose events repeat all so far, the last one. How events were cut into writes and mixed
between choices is left out too.
"""

from __future__ import annotations

import json
import math
from typing import Any

import aiohttp

VOLATILE = frozenset({"id", "created", "rid"})
DONE = "[DONE]"


async def told(answer: aiohttp.ClientResponse) -> Any:
    """A whole answer as it is; a stream as `{choice: pieces}`."""
    raw = await answer.text()
    if answer.content_type == "text/event-stream" and answer.status == 200:
        return _stream([line[6:] for line in raw.splitlines() if line.startswith("data: ")])
    try:
        return _lasting(json.loads(raw))
    except ValueError:
        return raw


def same(one: Any, other: Any) -> bool:
    """Equal, floats but for the last digits that a router loses when it writes JSON anew."""
    match one, other:
        case float(), float():
            return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12)
        case dict(), dict():
            return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
        case list(), list():
            return len(one) == len(other) and all(map(same, one, other))
        case _:
            return bool(one == other)


def _stream(events: list[str]) -> dict[str, Any]:
    assert DONE == events[-1], events[-3:]
    assert 1 == events.count(DONE)
    pieces: dict[str, Any] = {}
    for event in map(json.loads, events[:-1]):
        if "meta_info" in event:
            pieces[str(event.get("index", 0))] = _lasting(event)
            continue
        assert "choices" in event, event
        for choice in event["choices"]:
            pieces.setdefault(str(choice["index"]), []).append(_lasting(choice))
        if event.get("usage"):
            pieces["usage"] = event["usage"]
    return pieces


def _lasting(value: Any) -> Any:
    match value:
        case dict():
            return {name: _lasting(inner) for name, inner in value.items() if name not in VOLATILE}
        case list():
            return [_lasting(inner) for inner in value]
        case _:
            return value
