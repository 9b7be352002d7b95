"""The memory that a transport may touch: one arena of KV pages and metadata rows per rank.

arena      on the CPU: a memfd, shared with the transfer process
device     on a GPU: one allocation that only this process has
window     the bytes of either, as the host sees them
metadata   the rows behind the pages
finality   when what the model thread says about device memory is true
"""
