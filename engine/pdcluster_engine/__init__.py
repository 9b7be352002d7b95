"""The native engine: page memory, transports, prefill and decode loops, model, HTTP API."""
