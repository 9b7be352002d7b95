"""Bodies of clients and legs at both doors, up to the bodies that the router writes from them."""

from __future__ import annotations

import msgspec

from fuzz.mutation import Parts
from fuzz.target import Target, one_part
from fuzz.wire import KEY
from pdcluster_protocol.errors import InvalidRequest
from pdcluster_protocol.ids import Role
from pdcluster_protocol.requests import (
    Api,
    ParsedRequest,
    RequestLimits,
    check_prompt_length,
    encode_bounded,
    parse_request,
)
from pdcluster_sidecar.router.bodies import LegBodies, PairFields, SequenceFields

LIMITS = RequestLimits(served_name="tiny", max_context=512, vocab_size=300, batch_max=16)
NO_RAW: dict[str, msgspec.Raw] = {}
SEQUENCE = SequenceFields(rid="r", input_ids=msgspec.Raw(b"[1,2,3]"), seed=7)
PAIR = PairFields(
    bootstrap_host="127.64.0.2",
    bootstrap_port=8998,
    prefill_dp_rank=1,
    decode_dp_rank=0,
    budget_seconds=30.0,
)
CORPUS = (
    b'{"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0.5, "top_p": 0.9,'
    b' "n": 2, "stop": ["a", "b"], "logprobs": 3, "seed": 5, "stream": true,'
    b' "stream_options": {"include_usage": true}}',
    b'{"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 3, "stop_token_ids": [7], "ignore_eos": true,'
    b' "bootstrap_host": ["h", "h"], "bootstrap_port": [8998, 8998], "bootstrap_room": [5, 6]}',
    b'{"prompt": ["a", "b"], "min_p": 0.1, "top_k": 5, "presence_penalty": 1, "rid": ["x", "y"]}',
    b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content":'
    b' [{"type": "text", "text": "t"}]}], "max_completion_tokens": 4, "logprobs": true,'
    b' "top_logprobs": 2, "user": "u"}',
    b'{"text": "abc", "sampling_params": {"max_new_tokens": 5, "temperature": 0, "n": 1, "stop":'
    b' "x", "sampling_seed": 4}, "return_logprob": true, "top_logprobs_num": 2, "rid": "q"}',
    b'{"input_ids": [1, 2, 3], "sampling_params": {}, "bootstrap_host": "127.64.0.2",'
    b' "bootstrap_port": 8998, "bootstrap_room": 77, "routed_dp_rank": 0, "pd_attempt": 99,'
    b' "disagg_prefill_dp_rank": 1, "pd_budget_seconds": 3.5, "rid": "z"}',
)


def check_requests(parts: Parts) -> bool:
    """Understood or refused by name at each door; and a rewrite means the same."""
    taken = False
    for part in parts:
        for api in Api:
            for legs in (True, False):
                taken = _asked(api, part, legs=legs) or taken
    return taken


def _asked(api: Api, body: bytes, *, legs: bool) -> bool:
    try:
        parsed = parse_request(api, body, LIMITS, legs=legs)
    except InvalidRequest:
        return False
    again = parse_request(api, msgspec.json.encode(parsed.raw), LIMITS, legs=legs)
    assert msgspec.structs.replace(parsed, raw=NO_RAW) == msgspec.structs.replace(again, raw=NO_RAW)
    assert 1 <= parsed.sequence_count <= LIMITS.batch_max
    if not legs:
        assert parsed.leg is None
        _forwarded(api, parsed)
    elif parsed.leg is not None:
        assert parsed.sequence_count == len(parsed.leg.rooms) == len(parsed.leg.hosts)
    return _fits(parsed)


def _forwarded(api: Api, parsed: ParsedRequest) -> None:
    """What the router writes from a client's body is a leg, with nothing of the client's in it."""
    if parsed.n > 1 or len(parsed.prompts) > 1:
        # A leg carries one sequence, and the sampling's `n` is the router's own field.
        return
    for role in Role:
        body = LegBodies(parsed).encode(role, KEY, rid="r", sequence=SEQUENCE, pair=PAIR)
        leg = parse_request(api, body, LIMITS)
        assert leg.leg is not None
        assert (KEY.room,) == leg.leg.rooms
        assert ("127.64.0.2",) == leg.leg.hosts
        assert KEY.attempt == leg.leg.attempt
        assert (("r",), ((1, 2, 3),), 7) == (leg.rids, leg.prompts, leg.seed)
        assert parsed.sampling == leg.sampling


def _fits(parsed: ParsedRequest) -> bool:
    fits = False
    for prompt in parsed.prompts:
        try:
            ids = (
                encode_bounded(prompt, lambda text: list(text.encode()), LIMITS)
                if isinstance(prompt, str)
                else prompt
            )
            output_tokens_max = check_prompt_length(len(ids), parsed, LIMITS)
        except InvalidRequest:
            continue
        assert 1 <= output_tokens_max <= LIMITS.max_context - len(ids)
        fits = True
    return fits or parsed.messages is not None


TARGETS = (Target("requests", one_part(*CORPUS), check_requests, weight=3),)
