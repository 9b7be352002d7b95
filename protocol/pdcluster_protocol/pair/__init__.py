"""`Pair`: one client sequence is two legs, one deadline and one end.

A *leg* is the HTTP request to one side: prefill computes the prompt, decode answers the client.
What ends one leg ends the sequence: the other leg is aborted at once, and the client hears the
first *true* cause. The table below is the whole life:

    queued ──► running ──► streaming ──► done
      ▲ │         │ │          │
      │ │         │ └────┬─────┘
      │ │         │      ▼
      └─┼─ retry ─┴── judging ──► failed          (gone: the client left, from anywhere)
        └──────────────────────────► failed

- **True cause.** A leg that says "my peer failed" or "I was aborted" names a symptom. The machine
  then waits `grace_seconds` for what the other leg has to say, and answers with that. What the
  router itself saw (a refused or lost connection) is never a symptom.
- **Retry.** Only while the client has seen no byte, only for reasons that the request did not
  cause, at most `retries` times, under a new key. If no pair can be had then, the first cause is
  the answer.
- **After the first byte** decode owns the request: its KV was verified before it made a token. A
  failure of prefill is then only remembered, as the true cause of a later failure of decode.
- **Clocks.** Queued: `queue_seconds`. Until the first byte (a plain answer: the whole answer):
  `answer_seconds`. Streaming: no byte for `stall_seconds`. A pair with a silent peer has
  `stall_seconds` as well. Each error names its clock.

Parallel dispatch (push: both legs at once) and serial dispatch (pull: decode when prefill has
answered) differ in `OPENED_BY` only. Events of another key are leftovers of an earlier try and
change nothing.
"""

from __future__ import annotations

from pdcluster_protocol.pair.events import (
    AbortLeg,
    Answer,
    Cause,
    ClientGone,
    Effect,
    Event,
    FirstByte,
    LegAnswered,
    LegFailed,
    NoPairChosen,
    OpenLeg,
    PairChosen,
    PairClocks,
    PeerDead,
    PeerHeard,
    PeerSilent,
    Retry,
    Tick,
    Witness,
)
from pdcluster_protocol.pair.machine import Pair
from pdcluster_protocol.pair.table import (
    OPENED_BY,
    RETRYABLE,
    SYMPTOMS,
    TABLE,
    Dispatch,
    LegState,
    PairState,
    Trigger,
)

__all__ = [
    "OPENED_BY",
    "RETRYABLE",
    "SYMPTOMS",
    "TABLE",
    "AbortLeg",
    "Answer",
    "Cause",
    "ClientGone",
    "Dispatch",
    "Effect",
    "Event",
    "FirstByte",
    "LegAnswered",
    "LegFailed",
    "LegState",
    "NoPairChosen",
    "OpenLeg",
    "Pair",
    "PairChosen",
    "PairClocks",
    "PairState",
    "PeerDead",
    "PeerHeard",
    "PeerSilent",
    "Retry",
    "Tick",
    "Trigger",
    "Witness",
]
