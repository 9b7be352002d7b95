"""The engine's HTTP side: OpenAI's and SGLang's paths in front of the engine's threads.

One asyncio loop. A body is read and, if signed, checked (`door`); parsed by the protocol's own
`requests`; turned into one `Submission` per sequence (`sequences`); and run (`exchange`). Tokens
come back from other threads through a `Mailbox`, one wake-up for all that gathered meanwhile, and
leave in the shape of the API that was asked (`completions`, `chat`, `generate`), one write a
wake-up.

A *leg* (its fields name a partner) needs the cluster's signature; a request without partner is
computed by this engine alone. A prefill leg is answered when its pages have been taken; its answer
is one token, and a status.
"""

from __future__ import annotations

from pdcluster_engine.http.app import build_app, serve

__all__ = ["build_app", "serve"]
