"""The push dialect (SGLang's): rooms, registry, metadata, prefill writes, ABORT and ABORT_ACK."""
