"""The arena on the CPU: one memfd that engine and transfer process both map.

    0                          metadata_offset              nbytes
    | region 0 | region 1 | …  | aux rows, slot by slot | pad |

The KV part is cut by `KVLayout` alone. The file descriptor is close-on-exec: a transfer process
gets it by explicit hand-over, and nobody else keeps the memory of a dead engine alive.
"""

from __future__ import annotations

import mmap
import os

from pdcluster_engine.memory.window import HostWindow
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.layout import REGION_ALIGNMENT_BYTES, KVLayout


class Arena:
    """A zeroed shared mapping with the KV regions first and the metadata rows behind them."""

    __slots__ = ("fd", "metadata_offset", "nbytes", "view", "window")

    def __init__(self, fd: int, mapping: mmap.mmap, *, metadata_offset: int) -> None:
        self.fd = fd
        self.nbytes = len(mapping)
        self.metadata_offset = metadata_offset
        self.view = memoryview(mapping)
        self.window = HostWindow(self.view)

    @classmethod
    def create(cls, layout: KVLayout, page_count: int, *, metadata_bytes: int) -> Arena:
        """Map a new arena of `page_count` pages with `metadata_bytes` behind them.

        Raises:
            ConfigError: when there is no page, or the machine does not give that much memory.
        """
        metadata_offset, nbytes = arena_sizes(layout, page_count, metadata_bytes=metadata_bytes)
        fd = os.memfd_create("pdcluster-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"pages is {page_count}, which needs {nbytes} bytes of shared memory: {error}; "
                "lower pages or max_context"
            ) from error
        return cls(fd, mapping, metadata_offset=metadata_offset)

    def close(self) -> None:
        """Close the descriptor and let go of the mapping; repeated calls do nothing.

        The mapping ends with its last user. It must not be unmapped by force: a tensor over it
        keeps a reference but no lock, and would read from an address that is gone.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.view = memoryview(b"")
        self.window = HostWindow(self.view)


def arena_sizes(layout: KVLayout, page_count: int, *, metadata_bytes: int) -> tuple[int, int]:
    """(where the metadata rows begin, bytes in all) of an arena.

    Raises:
        ConfigError: when there is no page.
    """
    if page_count < 1:
        raise ConfigError(f"pages is {page_count}; an arena needs at least 1")
    if metadata_bytes < 0:
        raise ConfigError(f"metadata_bytes is {metadata_bytes}; it must not be negative")
    metadata_offset = layout.arena_bytes(page_count)
    return metadata_offset, max(_aligned(metadata_offset + metadata_bytes), REGION_ALIGNMENT_BYTES)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
