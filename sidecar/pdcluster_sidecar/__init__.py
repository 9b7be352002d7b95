"""The sidecar: asyncio shells around the protocol core, and the router."""
