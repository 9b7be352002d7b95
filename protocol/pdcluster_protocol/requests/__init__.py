"""What a client may ask for: OpenAI's two completion APIs and SGLang's `/generate`.

A body is decoded as a map from names to raw JSON, so that a doubled key has one meaning (the last
one) here and wherever the body is written again. Each field that we know is then decoded and
checked; an error names field, value and fix. What would change the answer and is not built is
refused by name; fields that nobody knows pass untouched.

The router parses a request before any handshake, an engine parses the leg that reaches it: the same
function, so both mean the same. The leg's own fields are `LegFields`.
"""

from __future__ import annotations

from pdcluster_protocol.requests.legs import COMPUTED_ALONE_HOST, LegFields
from pdcluster_protocol.requests.parsed import Api, ParsedRequest, RequestLimits, Sampling
from pdcluster_protocol.requests.parsing import check_prompt_length, encode_bounded, parse_request

__all__ = [
    "COMPUTED_ALONE_HOST",
    "Api",
    "LegFields",
    "ParsedRequest",
    "RequestLimits",
    "Sampling",
    "check_prompt_length",
    "encode_bounded",
    "parse_request",
]
