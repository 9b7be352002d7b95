"""The protocol core of PDCluster: sans-I/O machines, wire codecs, topology arithmetic, limits.

Nothing here performs I/O, reads a clock, rolls dice or writes a log. Events go in with the time as
an argument, effects come out. `docs/design.md` section 3 is the contract.
"""
