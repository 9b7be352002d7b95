"""The forward pass, which is the library's, over KV pages, which are ours.

    port      what the engine loop sees of a model
    loading   a source (builtin or folder) becomes a runner, a tokenizer and a layout
    builtin   tiny seeded models with a byte tokenizer, so that everything runs with no download
    probe     one token through the library's own cache tells the layout
    cache     the library's cache interface over pages
    shards    the rows of a region over the arenas of all ranks
    packing   the packed rows of `fp8_ds_mla`
    runner    prefill chunks and decode steps
    shim      the only module that calls the library's forward

Importing any of these computes nothing, so a parent process may import them all and fork.
"""
