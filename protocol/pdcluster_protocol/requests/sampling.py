"""The sampling fields, flat in a body (OpenAI) or inside `sampling_params` (`/generate`)."""

from __future__ import annotations

from pdcluster_protocol.requests.fields import Fields, Interval
from pdcluster_protocol.requests.parsed import Api, RequestLimits, Sampling

STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 1024
STOP_TOKEN_IDS_MAX = 256
TOKEN_ID_MAX = (1 << 31) - 1
TOP_K_OFF = -1

MAX_TOKENS_FIELDS = {
    Api.COMPLETIONS: ("max_tokens",),
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.GENERATE: ("max_new_tokens",),
}
"""The first one given counts."""
LOGPROBS_FIELDS = {
    Api.CHAT: ("logprobs", "top_logprobs"),
    Api.GENERATE: ("return_logprob", "top_logprobs_num"),
}
"""The switch, and the number of alternatives; completions have one field for both."""
AT_LEAST_ONE = Interval(1)
SEEDS = Interval(-(1 << 63), (1 << 64) - 1)
"""Signed as OpenAI says it, and above, since sample i of n gets seed + i."""


def parse_sampling(api: Api, fields: Fields, *, body: Fields, limits: RequestLimits) -> Sampling:
    """Read the sampling fields from `fields`; `body` is the outermost object."""
    return Sampling(
        temperature=_number(fields, "temperature", Interval(0, 2), default=1.0),
        top_p=_number(fields, "top_p", Interval(0, 1, low_open=True), default=1.0),
        top_k=_top_k(fields),
        min_p=_number(fields, "min_p", Interval(0, 1), default=0.0),
        repetition_penalty=_number(
            fields, "repetition_penalty", Interval(0, 2, low_open=True), default=1.0
        ),
        presence_penalty=_number(fields, "presence_penalty", Interval(-2, 2), default=0.0),
        frequency_penalty=_number(fields, "frequency_penalty", Interval(-2, 2), default=0.0),
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        skip_special_tokens=not fields.has("skip_special_tokens")
        or fields.boolean("skip_special_tokens"),
        logprobs=_logprobs(api, body, Interval(0, limits.logprobs_max)),
    )


def parse_seed(fields: Fields, body: Fields) -> int | None:
    """The seed; in `/generate` a router's own `seed` beside `sampling_params` comes first."""
    for place, name in ((body, "seed"), (fields, "seed"), (fields, "sampling_seed")):
        if place.has(name):
            return place.integer(name, SEEDS)
    return None


def parse_max_tokens(api: Api, fields: Fields) -> int | None:
    """The client's bound of output tokens; None when it gave none."""
    given = [
        fields.integer(name, AT_LEAST_ONE) for name in MAX_TOKENS_FIELDS[api] if fields.has(name)
    ]
    return given[0] if given else None


def parse_n(fields: Fields, limits: RequestLimits) -> int:
    """How many samples of each prompt."""
    return fields.integer("n", Interval(1, limits.n_max)) or 1


def _number(fields: Fields, name: str, allowed: Interval, *, default: float) -> float:
    number = fields.number(name, allowed)
    return default if number is None else number


def _top_k(fields: Fields) -> int:
    top_k = fields.integer("top_k", Interval(TOP_K_OFF))
    # 0 means "off" to vLLM, -1 to SGLang; no client means "choose from no token".
    return TOP_K_OFF if top_k is None or top_k == 0 else top_k


def _stop(fields: Fields) -> tuple[str, ...]:
    must = f"be a string, or a list of at most {STOP_STRINGS_MAX} strings, none of them empty"
    if not fields.has("stop"):
        return ()
    if fields.first_byte("stop") == b"[":
        stop = tuple(fields.value("stop", list[str], must) or ())
    else:
        stop = (fields.value("stop", str, must) or "",)
    if len(stop) > STOP_STRINGS_MAX or not all(stop):
        raise fields.refusal("stop", must)
    if max(map(len, stop), default=0) > STOP_STRING_CHARACTERS_MAX:
        raise fields.refusal("stop", f"hold at most {STOP_STRING_CHARACTERS_MAX} characters each")
    return stop


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    must = f"be a list of at most {STOP_TOKEN_IDS_MAX} token ids"
    ids = fields.value("stop_token_ids", list[int], must) or []
    if len(ids) > STOP_TOKEN_IDS_MAX or not all(0 <= token <= TOKEN_ID_MAX for token in ids):
        raise fields.refusal("stop_token_ids", must)
    return tuple(ids)


def _logprobs(api: Api, body: Fields, allowed: Interval) -> int | None:
    if api is Api.COMPLETIONS:
        return body.integer("logprobs", allowed)
    switch, count = LOGPROBS_FIELDS[api]
    alternatives = body.integer(count, allowed) or 0
    if body.boolean(switch):
        return alternatives
    if alternatives:
        raise body.refusal(count, f"be absent or 0, unless {switch} is true")
    return None
