"""Everything that decoding raises for bytes of any kind.

One tuple for all who decode what a peer or a client sent: the wrong form, a wrong type or value
(also one that a struct refuses itself, as a `PDClusterError`), text that is not UTF-8, and values
nested without end, which exhaust the recursion limit even below a field that nobody knows.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.errors import PDClusterError

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, PDClusterError)
