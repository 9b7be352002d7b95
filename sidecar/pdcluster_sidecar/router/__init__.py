"""The router: one process that pairs, runs and ends requests.

    client ──► serve ──► front ──► sequence ──► legs ──► prefill engine
                 ▲                    │  └─────────────► decode engine
                 └───── relays ◄──────┘

- `serve`, `replies`: the byte path to clients. `legs`, `answers`: the byte path to engines.
- `front`: one client request: parsed, tokenised, cut into sequences. `sequence`: the shell around
  one `Pair` of the protocol. `relays`, `merge`: from decode's bytes to the client's.
- `admission`, `pick`: the bounded queue and the choice of a pair. `members`, `tokens`: what the
  sidecars say. `admin`, `telemetry`: what people see. `process`: from configuration to exit.

Everything runs on one event loop. The hot path is callbacks on bare protocols and creates no task.
"""
