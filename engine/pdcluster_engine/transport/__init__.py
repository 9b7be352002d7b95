"""The transfer layer: bytes of one arena into the registered memory of a peer.

The owner thread sees one port (`port.Transport`) and these implementations behind it:

    supervised   a transfer process of our own around Mooncake; killing it is the fence
    inprocess    Mooncake in a thread of the engine, for device memory; destroying it is the fence
    local        unix sockets between processes of one machine: the oracle and most tests
    faulty       any of them, with seeded faults
    (mooncake)   the adapter inside that process or thread; nothing else imports the library

This package imports no torch and no Mooncake, so the transfer process stays small.
"""
