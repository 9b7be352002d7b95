"""The transfer layer: bytes of one arena into the registered memory of a peer.

The owner thread sees one port (`port.Transport`) and four implementations behind it:

    supervised   a transfer process of our own around Mooncake; killing it is the fence
    local        unix sockets between processes of one machine: the oracle and most tests
    faulty       any of them, with seeded faults
    (mooncake)   the adapter inside the transfer process; nothing else imports the library

This package imports no torch and no Mooncake, so the transfer process stays small.
"""
